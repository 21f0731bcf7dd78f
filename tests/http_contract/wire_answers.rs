//! Answers over real sockets: lengths, bytes, headers, both HTTP versions, half-read answers.

use std::io::{Read as _, Write as _};

use axum::body::Body;
use axum::extract::Path;
use futures_util::stream;
use http::{HeaderValue, Response};
use http_body_util::BodyExt as _;
use rand::RngCore as _;
use tower_http::compression::CompressionLayer;

use crate::harness::{Ask, Server, Shop, Wire, defaults, post};

const POST: &str = "POST /payments HTTP/1.1\r\nhost: shop\r\naccount: acme\r\n\
    idempotency-key: k\r\ncontent-length: 0\r\n\r\n";

fn pay() -> Ask {
    post("http://shop/payments").key("k").body("")
}

/// First answer and replay over HTTP/1.1.
async fn both(answer: impl Fn() -> Response<Body> + Clone + Send + Sync + 'static) -> [Wire; 2] {
    let shop = Shop::answering(defaults, move |_| answer());
    let server = Server::start(shop.app()).await;
    let first = server.exchange(POST).await;
    let second = server.exchange(POST).await;
    assert_eq!(first.header("idempotent-replayed"), None);
    assert_eq!(second.header("idempotent-replayed"), Some("true"));
    assert_eq!(first.status, second.status);
    shop.ledger.expect(1);
    [first, second]
}

// cases: 75
#[tokio::test]
async fn case_075_the_length_equals_the_bytes_in_first_answer_and_replay() {
    let frames = || {
        let frames = ["three ", "little ", "frames"].map(Ok::<_, std::convert::Infallible>);
        Body::from_stream(stream::iter(frames))
    };
    let with_length = |length: &'static str| {
        Response::builder().header("content-length", length).body(Body::from("hello")).unwrap()
    };
    for wire in both(move || with_length("5")).await {
        assert_eq!(
            (wire.header("content-length"), wire.body.as_slice()),
            (Some("5"), &b"hello"[..])
        );
    }
    for wire in both(move || Response::new(frames())).await {
        assert_eq!(wire.header("content-length"), Some("19"));
        assert_eq!(wire.header("transfer-encoding"), None);
        assert_eq!(wire.body, b"three little frames");
    }
    for wire in both(|| Response::new(Body::empty())).await {
        assert_eq!(wire.header("content-length"), Some("0"));
    }
    for wire in both(|| Response::builder().status(204).body(Body::empty()).unwrap()).await {
        assert_eq!(wire.header("content-length"), None);
        assert_eq!(wire.header("content-type"), None);
    }
}

/// Fault B26: wherever in the router the layer stands, and however the handler gives its body.
#[tokio::test]
async fn the_length_is_right_on_a_route_a_nested_router_and_the_app() {
    use axum::Router;
    use axum::routing::post as post_route;
    let hello = async |Path(kind): Path<String>| {
        let frames = ["hel", "lo"].map(Ok::<_, std::convert::Infallible>);
        let response = Response::builder();
        match kind.as_str() {
            "known" => response.body(Body::from("hello")),
            "chunked" => response.body(Body::from_stream(stream::iter(frames))),
            "empty" => response.body(Body::empty()),
            _ => response.header("content-length", "5").body(Body::from("hello")),
        }
        .unwrap()
    };
    let shop = Shop::open();
    let ours = || shop.layer.clone();
    let method = || post_route(hello);
    let route = || Router::new().route("/{kind}", method());
    let apps = [
        (
            "a method",
            Router::new().nest("/p", Router::new().route("/{kind}", method().layer(ours()))),
        ),
        ("nest, layer within", Router::new().nest("/p", route().layer(ours()))),
        ("nest, route_layer within", Router::new().nest("/p", route().route_layer(ours()))),
        ("nest, layer around", Router::new().nest("/p", route()).layer(ours())),
        ("nest, route_layer around", Router::new().nest("/p", route()).route_layer(ours())),
        ("two nests", Router::new().nest("/p", Router::new().nest("/q", route().layer(ours())))),
        ("merge, layer", Router::new().merge(route().layer(ours()))),
        ("merge, route_layer", Router::new().merge(route()).route_layer(ours())),
    ];
    for (number, (place, app)) in apps.into_iter().enumerate() {
        let server = Server::start(app).await;
        let prefix = match number {
            5 => "/p/q",
            6.. => "",
            _ => "/p",
        };
        for (kind, body) in
            [("known", "hello"), ("chunked", "hello"), ("empty", ""), ("explicit", "hello")]
        {
            let request = POST
                .replace("/payments", &format!("{prefix}/{kind}"))
                .replace("idempotency-key: k", &format!("idempotency-key: {number}-{kind}"));
            for replayed in [false, true] {
                let wire = server.exchange(&request).await;
                wire.expect(200, replayed);
                let length = body.len().to_string();
                let what = format!("{place}, {kind}, replayed: {replayed}");
                assert_eq!(wire.header("content-length"), Some(length.as_str()), "{what}");
                assert_eq!(wire.header("transfer-encoding"), None, "{what}");
                assert_eq!(wire.body, body.as_bytes(), "{what}");
            }
        }
    }
}

// cases: 76
#[tokio::test]
async fn case_076_bytes_of_every_kind_come_back_as_they_were() {
    let mut random = vec![0; 1_000_000];
    rand::rng().fill_bytes(&mut random);
    // Three bytes, compressed by gzip, and not valid in any text encoding.
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x4b\x4c\x4a\x06\x00\xc2\x41\x24\x35\x03\x00\x00\x00";
    for (encoding, body) in
        [(None, (0..=255).collect::<Vec<u8>>()), (Some("gzip"), gzip.to_vec()), (None, random)]
    {
        let sent = body.clone();
        let [first, second] = both(move || {
            let mut response = Response::new(Body::from(sent.clone()));
            if let Some(encoding) = encoding {
                let encoding = HeaderValue::from_static(encoding);
                response.headers_mut().insert("content-encoding", encoding);
            }
            response
        })
        .await;
        assert!(first.body == body && second.body == body);
        assert_eq!(second.header("content-encoding"), encoding);
    }
}

// cases: 73
#[tokio::test]
async fn case_073_repeated_headers_with_bytes_that_are_no_text_come_back_in_order() {
    let [first, second] = both(|| {
        let mut response = Response::new(Body::empty());
        for value in [b"caf\xe9".as_slice(), b"\xff\xfe", b"", b"plain"] {
            let value = HeaderValue::from_bytes(value).unwrap();
            response.headers_mut().append("x-application", value);
        }
        response
    })
    .await;
    let expect: [&[u8]; 4] = [b"caf\xe9", b"\xff\xfe", b"", b"plain"];
    assert_eq!(first.lines("x-application"), expect);
    assert_eq!(second.lines("x-application"), expect);
}

// cases: 74
#[tokio::test]
async fn case_074_connection_headers_of_one_http_version_never_reach_the_other() {
    for recorded_over_http2 in [false, true] {
        let shop = Shop::answering(defaults, |_| {
            let response = Response::builder()
                .header("connection", "x-hop")
                .header("x-hop", "1")
                .header("keep-alive", "timeout=5")
                .header("transfer-encoding", "chunked")
                .header("x-application", "stays");
            // As a handler relays an upstream's answer: with its headers, and as a stream.
            let frames = ["hel", "lo"].map(Ok::<_, std::convert::Infallible>);
            response.body(Body::from_stream(stream::iter(frames))).unwrap()
        });
        let server = Server::start(shop.app()).await;
        let over_http2 = async || {
            let response = server.http2().await.send(pay().request()).await;
            let (head, body) = response.into_parts();
            (head.headers, body.collect().await.unwrap().to_bytes())
        };
        if recorded_over_http2 {
            let (headers, body) = over_http2().await;
            assert_eq!(body, "hello");
            assert!(!headers.contains_key("idempotent-replayed"));
            let replay = server.exchange(POST).await;
            replay.expect(200, true);
            assert_eq!((replay.body.as_slice(), replay.header("x-hop")), (&b"hello"[..], None));
            assert_eq!(replay.header("keep-alive"), None);
            assert_eq!(replay.header("transfer-encoding"), None);
            assert_eq!(replay.header("x-application"), Some("stays"));
        } else {
            let first = server.exchange(POST).await;
            first.expect(200, false);
            assert_eq!(first.body, b"hello");
            let (headers, body) = over_http2().await;
            assert_eq!(body, "hello");
            assert_eq!(headers["idempotent-replayed"], "true");
            assert_eq!(headers["x-application"], "stays");
            for hop in ["connection", "x-hop", "keep-alive", "transfer-encoding"] {
                assert!(!headers.contains_key(hop), "{hop}");
            }
        }
        shop.ledger.expect(1);
    }
}

// cases: 74
#[tokio::test]
async fn case_074_every_answer_has_one_date_which_is_its_own() {
    let old = "Sun, 06 Nov 1994 08:49:37 GMT";
    let [first, second] =
        both(move || Response::builder().header("date", old).body(Body::empty()).unwrap()).await;
    assert_eq!(first.header("date"), Some(old));
    assert!(second.header("date").is_some_and(|date| date != old));
}

// cases: 81
#[tokio::test]
async fn case_081_compression_outside_follows_the_request_and_inside_stays_with_the_bytes() {
    let text = "all work and no play makes jack a dull boy. ".repeat(50);
    let shop = {
        let text = text.clone();
        Shop::answering(defaults, move |_| {
            let response = Response::builder().header("content-type", "text/plain");
            response.body(Body::from(text.clone())).unwrap()
        })
    };
    let accepting =
        |key: &str, encoding: &str| post("/payments").key(key).header("accept-encoding", encoding);
    let outside = shop.clone().wrapped(|app| app.layer(CompressionLayer::new()));
    let zipped = outside.send(&accepting("outside", "gzip")).await;
    assert_eq!(zipped.header("content-encoding"), Some("gzip"));
    for plain in ["identity", "gzip;q=0"] {
        let seen = outside.send(&accepting("outside", plain)).await.replayed(200);
        assert_eq!((seen.header("content-encoding"), seen.text()), (None, text.as_str()));
    }
    let again = outside.send(&accepting("outside", "gzip")).await.replayed(200);
    assert_eq!(again.header("content-encoding"), Some("gzip"));
    assert_eq!(again.body, zipped.body);

    let inside = shop.lined(|app| app.layer(CompressionLayer::new()));
    let zipped = inside.send(&accepting("inside", "gzip")).await;
    assert_eq!(zipped.header("content-encoding"), Some("gzip"));
    let plain = inside.send(&accepting("inside", "identity")).await.replay_of(&zipped);
    assert_eq!(plain.header("content-encoding"), Some("gzip"));
    assert_eq!(plain.header("vary"), Some("accept-encoding"));
    inside.ledger.expect(2);
}

/// Fault B41: the first request asks for no coding, the retry for gzip.
#[tokio::test]
async fn fault_b41_a_plain_record_is_compressed_outside_and_stays_plain_inside() {
    let text = "all work and no play makes jack a dull boy. ".repeat(50);
    let shop = {
        let text = text.clone();
        Shop::answering(defaults, move |_| {
            let response = Response::builder().header("content-type", "text/plain");
            response.body(Body::from(text.clone())).unwrap()
        })
    };
    let accepting =
        |key: &str, encoding: &str| post("/payments").key(key).header("accept-encoding", encoding);
    let outside = shop.clone().wrapped(|app| app.layer(CompressionLayer::new()));
    let plain = outside.send(&accepting("outside", "identity")).await.fresh(200);
    assert_eq!((plain.header("content-encoding"), plain.text()), (None, text.as_str()));
    let zipped = outside.send(&accepting("outside", "gzip")).await.replayed(200);
    assert_eq!(zipped.header("content-encoding"), Some("gzip"));
    assert_eq!(unzipped(&zipped.body), text.as_bytes());

    let inside = shop.lined(|app| app.layer(CompressionLayer::new()));
    let plain = inside.send(&accepting("inside", "identity")).await.fresh(200);
    let retry = inside.send(&accepting("inside", "gzip")).await.replay_of(&plain);
    assert_eq!((retry.header("content-encoding"), retry.text()), (None, text.as_str()));
    inside.ledger.expect(2);
}

/// Fault B41: a handler that compresses for itself is never compressed a second time, first or replayed.
#[tokio::test]
async fn fault_b41_a_handler_that_compresses_for_itself_is_compressed_once() {
    let text = b"all work and no play makes jack a dull boy. ".repeat(50);
    let mut zip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    zip.write_all(&text).unwrap();
    let zip = zip.finish().unwrap();
    let shop = {
        let zip = zip.clone();
        Shop::answering(defaults, move |_| {
            let response = Response::builder().header("content-type", "text/plain");
            let response = response.header("content-encoding", "gzip");
            response.body(Body::from(zip.clone())).unwrap()
        })
    };
    let outside = shop.clone().wrapped(|app| app.layer(CompressionLayer::new()));
    let inside = shop.clone().lined(|app| app.layer(CompressionLayer::new()));
    for (key, shop) in [("outside", outside), ("inside", inside)] {
        for (number, encoding) in ["gzip", "identity", "gzip"].into_iter().enumerate() {
            let ask = post("/payments").key(key).header("accept-encoding", encoding);
            let seen = shop.send(&ask).await;
            let seen = if number == 0 { seen.fresh(200) } else { seen.replayed(200) };
            assert_eq!(seen.header("content-encoding"), Some("gzip"), "{key}, {encoding}");
            assert!(seen.body == zip, "{key}, {encoding}: other bytes");
        }
    }
    assert_eq!(unzipped(&zip), text);
    shop.ledger.expect(2);
}

fn unzipped(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    plain
}

// cases: 60
#[tokio::test]
async fn case_060_a_compressed_body_is_another_request_where_nothing_outside_decompresses() {
    let shop = Shop::open();
    shop.send(&post("/payments").key("k").body("abc")).await.fresh(201);
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x4b\x4c\x4a\x06\x00\xc2\x41\x24\x35\x03\x00\x00\x00";
    let zipped = post("/payments").key("k").header("content-encoding", "gzip");
    shop.send(&zipped.body(gzip.as_slice())).await.refused(422, "key_reused");
    shop.ledger.expect(1);
}

/// A client that closes in the middle of the answer finds it whole when it comes back.
#[tokio::test]
async fn an_answer_that_was_read_by_half_is_recorded_and_replayed_whole() {
    let shop = Shop::answering(defaults, |_| Response::new(Body::from(vec![b'x'; 1_000_000])));
    let server = Server::start(shop.app()).await;
    let mut raw = server.connect().await;
    raw.send(POST).await;
    assert_eq!(raw.head().await.header("content-length"), Some("1000000"));
    drop(raw);
    let whole = server.exchange(POST).await;
    whole.expect(200, true);
    assert_eq!(whole.body, vec![b'x'; 1_000_000]);
    shop.ledger.expect(1);
}
