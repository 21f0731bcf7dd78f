//! Requests over real sockets: header lines, bytes that no client library would send, broken and
//! endless uploads, upgrades.

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse as _;
use axum::routing::get as get_route;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tower_idempotency::MissingKey;

use crate::harness::{Raw, Server, Shop, Wire, defaults, post};

const BODY: &str = "amount=100";

/// A whole request with these header lines, as bytes.
fn raw_post(lines: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"POST /payments HTTP/1.1\r\nhost: shop\r\naccount: acme\r\n".to_vec();
    for line in lines {
        bytes.extend_from_slice(line);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(format!("content-length: {}\r\n\r\n{BODY}", BODY.len()).as_bytes());
    bytes
}

fn with_key(key: &str) -> Vec<u8> {
    raw_post(&[format!("idempotency-key: {key}").as_bytes()])
}

async fn served(shop: &Shop) -> Server {
    Server::start(shop.app()).await
}

// cases: 9
#[tokio::test]
async fn case_009_any_letter_case_and_either_http_version_is_one_header() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let first = server.exchange(raw_post(&[b"IDEMPOTENCY-KEY: k"])).await;
    first.expect(201, false);
    for line in [b"Idempotency-Key: k", b"idempotency-key: k", b"iDEMPOTENCY-kEY:k "] {
        server.exchange(raw_post(&[line])).await.expect(201, true);
    }
    let mut request = post("http://shop/payments").key("k").request();
    *request.version_mut() = http::Version::HTTP_2;
    let response = server.http2().await.send(request).await;
    assert_eq!(response.status(), 201);
    assert_eq!(response.headers()["idempotent-replayed"], "true");
    shop.ledger.expect(1);
}

// cases: 20, 21, 22
#[tokio::test]
async fn case_020_more_than_one_header_line_is_refused_whatever_they_say() {
    let shop = Shop::open();
    let server = served(&shop).await;
    for lines in [
        ["idempotency-key: a", "idempotency-key: b"],
        ["idempotency-key: a", "idempotency-key: a"],
        ["idempotency-key: \"a", "idempotency-key: b\""],
        ["idempotency-key: a", "Idempotency-Key:"],
        ["idempotency-key: \"a\"", "IDEMPOTENCY-KEY: ;v=1"],
    ] {
        let wire = server.exchange(raw_post(&lines.map(str::as_bytes))).await;
        wire.expect_code(400, "key_invalid");
    }
    shop.expect_untouched();
}

// cases: 24, 27
#[tokio::test]
async fn case_024_an_empty_line_is_a_malformed_key_and_outer_space_is_no_part_of_one() {
    let shop = Shop::with(|config| config.missing_key(MissingKey::PassThrough));
    let server = served(&shop).await;
    for line in
        ["idempotency-key:", "idempotency-key: ", "idempotency-key: \t ", "idempotency-key: \"\""]
    {
        server.exchange(raw_post(&[line.as_bytes()])).await.expect_code(400, "key_invalid");
    }
    shop.expect_untouched();
    server.exchange(with_key("k")).await.expect(201, false);
    for line in ["idempotency-key:k", "idempotency-key:\t k \t", "idempotency-key:  \"k\" "] {
        server.exchange(raw_post(&[line.as_bytes()])).await.expect(201, true);
    }
    shop.ledger.expect(1);
}

// cases: 25
#[tokio::test]
async fn case_025_the_limit_of_255_bytes_holds_on_the_wire() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let longest = "k".repeat(255);
    server.exchange(with_key(&longest)).await.expect(201, false);
    server.exchange(with_key(&format!("\"{longest}\""))).await.expect(201, true);
    server.exchange(with_key(&"k".repeat(256))).await.expect_code(400, "key_invalid");
    shop.ledger.expect(1);
}

// cases: 28, 29
#[tokio::test]
async fn case_029_control_bytes_and_bytes_beyond_ascii_are_refused_by_the_stack_or_the_layer() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let forbidden = (0..0x20_u8).chain(0x7f..=0xff).filter(|byte| !b"\r\n".contains(byte));
    for byte in forbidden {
        for quoted in [false, true] {
            let key: &[u8] =
                if quoted { &[b'"', b'a', byte, b'b', b'"'] } else { &[b'a', byte, b'b'] };
            let line = [b"idempotency-key: ", key].concat();
            let status = server.exchange(raw_post(&[&line])).await.status;
            assert_eq!(status, 400, "byte {byte:#04x}");
        }
    }
    shop.expect_untouched();
}

// cases: 62
#[tokio::test]
async fn case_062_an_upload_that_is_aborted_leaves_nothing_and_the_whole_request_runs() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let whole = with_key("k");
    for cut in [BODY.len(), 1] {
        let mut raw = server.connect().await;
        raw.send(&whole[..whole.len() - cut]).await;
        drop(raw);
    }
    // Also by a client that only says that it will send no more.
    let mut raw = server.connect().await;
    raw.send(&whole[..whole.len() - 1]).await;
    raw.half_close().await;
    raw.closed().await;
    shop.expect_untouched();
    server.exchange(&whole).await.expect(201, false);
    server.exchange(&whole).await.expect(201, true);
    shop.ledger.expect(1);
    assert_eq!(shop.records(), 1);
}

const CHUNKED: &[u8] = b"POST /payments HTTP/1.1\r\nhost: shop\r\naccount: acme\r\n\
    idempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n";

// cases: 61
#[tokio::test]
async fn case_061_an_endless_upload_is_413_as_soon_as_it_passes_the_limit() {
    let shop = Shop::with(|config| config.request_limit(10_000));
    let server = served(&shop).await;
    let mut raw = server.connect().await;
    raw.send(CHUNKED).await;
    let chunk = [b"1000\r\n".as_slice(), &[b'x'; 0x1000], b"\r\n"].concat();
    for _ in 0..3 {
        raw.send(&chunk).await;
    }
    raw.answer().await.expect_code(413, "request_too_large");
    shop.expect_untouched();
    // Nor does the server swallow the rest, however long it goes on.
    let mut raw = server.connect().await;
    raw.send(CHUNKED).await;
    let mut sent = 0;
    while sent < 1 << 28 && raw.try_send(&chunk).await {
        sent += chunk.len();
    }
    assert!(sent < 1 << 28, "{sent} bytes were taken");
    shop.expect_untouched();
}

// cases: 61
#[tokio::test]
async fn case_061_a_length_over_the_limit_is_413_before_any_of_the_body_is_read() {
    let shop = Shop::with(|config| config.request_limit(10));
    let server = served(&shop).await;
    let head = "POST / HTTP/1.1\r\nhost: shop\r\naccount: acme\r\nidempotency-key: k\r\n";
    let mut raw = server.connect().await;
    raw.send(format!("{head}content-length: 11\r\n\r\n")).await;
    raw.answer().await.expect_code(413, "request_too_large");
    shop.expect_untouched();
}

// cases: 59
#[tokio::test]
async fn case_059_chunked_and_fixed_length_are_one_request_on_the_wire() {
    let shop = Shop::open();
    let server = served(&shop).await;
    server.exchange(with_key("k")).await.expect(201, false);
    let chunks = b"3\r\namo\r\n7\r\nunt=100\r\n0\r\n\r\n";
    server.exchange([CHUNKED, chunks].concat()).await.expect(201, true);
    shop.ledger.expect(1);
}

/// Fault B29: the claim is taken only once the whole body is here.
#[tokio::test]
async fn a_client_that_expects_100_continue_is_told_to_go_on_before_anything_is_claimed() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let mut raw = server.connect().await;
    let whole = raw_post(&[b"idempotency-key: k", b"expect: 100-continue"]);
    let (head, body) = whole.split_at(whole.len() - BODY.len());
    raw.send(head).await;
    assert_eq!(raw.head().await.status, 100);
    shop.expect_untouched();
    raw.send(body).await;
    raw.answer().await.expect(201, false);
    shop.ledger.expect(1);
    // A refusal that needs no body comes without a 100.
    let mut raw = server.connect().await;
    let whole = raw_post(&[b"idempotency-key: bad key", b"expect: 100-continue"]);
    raw.send(&whole[..whole.len() - BODY.len()]).await;
    raw.answer().await.expect_code(400, "key_invalid");
}

/// Fault B29: between the 100 and the body there may be any time, and the body may come in parts. Until
/// its last byte nothing is claimed: a whole request under the same key runs meanwhile, and the late one
/// gets its answer.
#[tokio::test]
async fn a_body_that_comes_long_after_the_100_claims_nothing_before_its_last_byte() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let whole = raw_post(&[b"idempotency-key: k", b"expect: 100-continue"]);
    let (head, body) = whole.split_at(whole.len() - BODY.len());
    let mut late = server.connect().await;
    late.send(head).await;
    assert_eq!(late.head().await.status, 100);
    shop.expect_untouched();
    late.send(&body[..BODY.len() - 1]).await;
    // By the time of this answer the server has had the parts before it for long.
    server.exchange(raw_post(&[])).await.expect_code(400, "key_missing");
    shop.expect_untouched();
    server.exchange(with_key("k")).await.expect(201, false);
    shop.ledger.expect(1);
    let claims = shop.store.calls();
    late.send(&body[BODY.len() - 1..]).await;
    late.answer().await.expect(201, true);
    shop.ledger.expect(1);
    assert_eq!(shop.store.calls(), claims + 1);
}

/// An answer that needs no body leaves it unread, and the connection is still good for the next.
#[tokio::test]
async fn a_connection_survives_refusals_and_replays() {
    let shop = Shop::open();
    let server = served(&shop).await;
    let mut raw = server.connect().await;
    raw.send(with_key("bad key")).await;
    raw.answer().await.expect_code(400, "key_invalid");
    for replayed in [false, true, true] {
        raw.send(with_key("k")).await;
        raw.answer().await.expect(201, replayed);
    }
    raw.send(raw_post(&[])).await;
    raw.answer().await.expect_code(400, "key_missing");
    shop.ledger.expect(1);
}

/// Fault B27: HEAD and GET look exactly as they do without the layer.
#[tokio::test]
async fn head_and_get_are_as_they_are_without_the_layer() {
    let shop = Shop::serving(defaults, |_| {
        let streamed = || async {
            let frames = stream::iter(["one", "two"].map(Ok::<_, std::convert::Infallible>));
            Response::new(Body::from_stream(frames))
        };
        Router::new()
            .route("/known", get_route(|| async { "hello" }))
            .route("/streamed", get_route(streamed))
    });
    let layered = served(&shop).await;
    let bare = Server::start((shop.routes)(shop.ledger.clone())).await;
    for path in ["/known", "/streamed", "/missing"] {
        for key in ["", "idempotency-key: k\r\n"] {
            for method in ["GET", "HEAD"] {
                let request = format!("{method} {path} HTTP/1.1\r\nhost: shop\r\n{key}\r\n");
                let look = async |server: &Server| -> Wire {
                    let mut raw: Raw = server.connect().await;
                    raw.send(&request).await;
                    let mut wire = match method {
                        "GET" => raw.answer().await,
                        _ => raw.head().await,
                    };
                    wire.headers.retain(|(name, _)| name != "date");
                    wire
                };
                let (with, without) = (look(&layered).await, look(&bare).await);
                assert_eq!(with.status, without.status);
                assert_eq!(with.headers, without.headers, "{method} {path}");
                assert_eq!(with.body, without.body);
            }
        }
    }
    shop.expect_untouched();
}

// cases: 104
#[tokio::test]
async fn case_104_an_upgrade_passes_and_is_never_recorded() {
    let shop = Shop::serving(defaults, |ledger| {
        Router::new().fallback(async move |request: Request<Body>| {
            ledger.note("upgrade");
            tokio::spawn(async move {
                let upgraded = hyper::upgrade::on(request).await.unwrap();
                let (mut read, mut write) = tokio::io::split(TokioIo::new(upgraded));
                tokio::io::copy(&mut read, &mut write).await.unwrap();
            });
            let headers = [("connection", "upgrade"), ("upgrade", "echo")];
            (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
        })
    });
    let server = served(&shop).await;
    let upgrade = |method: &str| {
        format!(
            "{method} /socket HTTP/1.1\r\nhost: shop\r\naccount: acme\r\nidempotency-key: k\r\n\
             connection: upgrade\r\nupgrade: echo\r\n\r\n"
        )
    };
    for _ in 0..2 {
        let mut raw = server.connect().await;
        raw.send(upgrade("GET")).await;
        assert_eq!(raw.head().await.status, 101);
        raw.send("marco").await;
        assert_eq!(raw.until(b"marco").await, b"");
    }
    shop.ledger.expect(2);
    assert_eq!(shop.store.calls(), 0);
    // On a covered method it works too, once.
    let mut raw = server.connect().await;
    raw.send(upgrade("POST")).await;
    assert_eq!(raw.head().await.status, 101);
    raw.send("polo").await;
    assert_eq!(raw.until(b"polo").await, b"");
    server.exchange(upgrade("POST")).await.expect_code(409, "result_unavailable");
    shop.ledger.expect(3);
}
