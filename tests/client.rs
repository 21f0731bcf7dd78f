//! The retrying client on real sockets: every fault that other clients had (`B106` to `B113` of the
//! list of faults that this crate was built against), with hyper and with reqwest.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::client::{
    Answered, ClientError, ClientErrorKind, GaveUp, Keys, RetryBudget, RetryLayer, RetryMiddleware,
    RetryPolicy,
};
use tower_idempotency::{IdempotencyKey, KeySyntax};

#[path = "support/cutting.rs"]
mod cutting;
#[path = "client/payments.rs"]
mod payments;
#[path = "support/redis.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod redis;
#[path = "support/sandbox.rs"]
mod sandbox;
#[path = "support/wire.rs"]
mod wire;
use wire::{Act, Wire, answer, created, problem, replayed};

/// Both clients are to do the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Hyper,
    Reqwest,
}

const BOTH: [Kind; 2] = [Kind::Hyper, Kind::Reqwest];

/// A request to be sent through a client.
#[derive(Clone, Debug)]
struct Call {
    method: Method,
    url: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Call {
    fn new(method: Method, url: String) -> Self {
        let body = Bytes::from_static(br#"{"amount":1999,"currency":"usd","source":"tok_visa"}"#);
        Self { method, url, headers: HeaderMap::new(), body }
    }

    fn post(url: String) -> Self {
        Self::new(Method::POST, url)
    }

    fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.append(name, value.parse().unwrap());
        self
    }

    fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }
}

/// How a call ended.
#[derive(Debug)]
struct Done {
    status: StatusCode,
    body: Bytes,
    answered: Answered,
}

/// What is compared of an error.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Failed {
    kind: ClientErrorKind,
    tries: u32,
    key: Option<String>,
    safe_new_key: bool,
    status: Option<u16>,
}

impl From<&ClientError> for Failed {
    fn from(error: &ClientError) -> Self {
        Self {
            kind: *error.kind(),
            tries: error.tries(),
            key: error.key().map(|key| key.as_str().to_owned()),
            safe_new_key: error.is_safe_new_key(),
            status: error.response().map(|response| response.status().as_u16()),
        }
    }
}

/// Quick enough for a test.
fn policy() -> RetryPolicy {
    RetryPolicy::new().first_pause(Duration::from_millis(40)).try_timeout(Duration::from_secs(10))
}

fn reqwest_client(policy: RetryPolicy) -> reqwest_middleware::ClientWithMiddleware {
    // A developer's own proxy settings are not part of a test.
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    reqwest_middleware::ClientBuilder::new(client).with(RetryMiddleware::new(policy)).build()
}

async fn send(kind: Kind, policy: RetryPolicy, call: Call) -> Result<Done, Failed> {
    match kind {
        Kind::Hyper => {
            let client = Client::builder(TokioExecutor::new()).build_http();
            let client = RetryLayer::new(policy).layer(client);
            let mut request = Request::builder().method(call.method).uri(call.url);
            *request.headers_mut().unwrap() = call.headers;
            let request = request.body(Full::new(call.body)).unwrap();
            let response = client.oneshot(request).await.map_err(|error| Failed::from(&error))?;
            let answered = response.extensions().get::<Answered>().unwrap().clone();
            let status = response.status();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            Ok(Done { status, body, answered })
        }
        Kind::Reqwest => {
            let request = reqwest_client(policy).request(call.method, call.url);
            let response = request.headers(call.headers).body(call.body).send().await;
            let response = response.map_err(|error| {
                Failed::from(ClientError::in_middleware(&error).expect("a typed error"))
            })?;
            let answered = response.extensions().get::<Answered>().unwrap().clone();
            let status = response.status();
            Ok(Done { status, body: response.bytes().await.unwrap(), answered })
        }
    }
}

/// An address that nobody listens on.
fn closed() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn b106_one_operation_has_one_key_over_all_its_tries() {
    for kind in BOTH {
        for given in [None, Some("order-17")] {
            let broken = Act::ResetInAnswer(answer(201, &[], r#"{"id":"pay_1"}"#));
            let wire = Wire::start([Act::Close, broken, Act::ResetInBody, created()]).await;
            let mut call = Call::post(wire.url("/v1/payments"));
            if let Some(given) = given {
                call = call.key(given);
            }
            let done = send(kind, policy(), call).await.unwrap();
            assert_eq!((done.status, done.answered.tries()), (StatusCode::CREATED, 4), "{kind:?}");
            let keys: BTreeSet<_> = wire.received().iter().map(|one| one.key()).collect();
            let known = done.answered.key().unwrap().as_str().to_owned();
            assert_eq!(keys, BTreeSet::from([known.clone()]), "{kind:?}");
            assert_eq!(known, given.map_or(known.clone(), str::to_owned));
        }
    }
}

#[tokio::test]
async fn b106_a_key_that_was_kept_goes_on_after_a_restart_of_the_client() {
    for kind in BOTH {
        let wire = Wire::start([Act::Close, Act::Close, replayed()]).await;
        let kept = IdempotencyKey::random().as_str().to_owned();
        let call = || {
            let key = IdempotencyKey::parse(kept.as_bytes(), KeySyntax::BareOrQuoted).unwrap();
            Call::post(wire.url("/v1/payments")).key(key.to_header_value().to_str().unwrap())
        };
        let failed = send(kind, policy().max_tries(2), call()).await.unwrap_err();
        assert_eq!(failed.kind, ClientErrorKind::GaveUp(GaveUp::Tries));
        assert_eq!((failed.tries, failed.key.as_deref()), (2, Some(kept.as_str())));
        assert!(!failed.safe_new_key);
        // Another client, as after a crash.
        let done = send(kind, policy(), call()).await.unwrap();
        assert!(done.answered.is_replay());
        assert!(wire.received().iter().all(|one| one.key() == kept), "{kind:?}");
    }
}

#[tokio::test]
async fn b108_what_is_in_progress_is_waited_for_under_the_same_key() {
    for kind in BOTH {
        let busy = || problem(409, "key_in_use", true, Some("0"));
        let wire = Wire::start([busy(), busy(), busy(), replayed()]).await;
        // An empty budget: waiting for one's own operation is free.
        let policy = policy().budget(RetryBudget::of(0));
        let done = send(kind, policy, Call::post(wire.url("/pay"))).await.unwrap();
        assert_eq!((done.status, done.answered.tries()), (StatusCode::CREATED, 4), "{kind:?}");
        assert!(done.answered.is_replay());
        let keys: BTreeSet<_> = wire.received().iter().map(|one| one.key()).collect();
        assert_eq!(keys.len(), 1);
    }
}

#[tokio::test]
async fn b108_a_final_refusal_stops_at_once_with_a_typed_error_and_no_new_key() {
    for kind in BOTH {
        for (act, expect, status) in [
            (problem(422, "key_reused", false, None), ClientErrorKind::KeyReused, 422),
            (problem(409, "outcome_unknown", false, None), ClientErrorKind::OutcomeUnknown, 409),
            (problem(500, "outcome_unknown", false, None), ClientErrorKind::OutcomeUnknown, 500),
            (
                problem(409, "result_unavailable", false, None),
                ClientErrorKind::ResultUnavailable,
                409,
            ),
        ] {
            let wire = Wire::start([act]).await;
            let failed = send(kind, policy(), Call::post(wire.url("/pay")).key("k")).await;
            let (key, safe_new_key) = (Some("k".to_owned()), false);
            let status = Some(status);
            let expect = Failed { kind: expect, tries: 1, key, safe_new_key, status };
            assert_eq!(failed.unwrap_err(), expect, "{kind:?}");
            assert_eq!(wire.received().len(), 1);
        }
    }
}

#[tokio::test]
async fn b108_what_is_unclear_is_tried_again_under_the_same_key() {
    for kind in BOTH {
        let plain = |status| Act::Answer(answer(status, &[], "x"));
        for (acts, tries) in [
            (vec![plain(500), plain(502), plain(504), created()], 4),
            (vec![plain(429), plain(503), created()], 3),
            (vec![problem(503, "store_unavailable", true, Some("0")), created()], 2),
            (vec![Act::Close, Act::ResetInBody, created()], 3),
        ] {
            let wire = Wire::start(acts).await;
            let done = send(kind, policy(), Call::post(wire.url("/pay"))).await.unwrap();
            assert_eq!((done.status, done.answered.tries()), (StatusCode::CREATED, tries));
            let keys: BTreeSet<_> = wire.received().iter().map(|one| one.key()).collect();
            assert_eq!(keys.len(), 1, "{kind:?}");
        }
        // The server said that this error is the answer.
        let no = [("stripe-should-retry", "false")];
        let wire = Wire::start([Act::Answer(answer(500, &no, "x"))]).await;
        let done = send(kind, policy(), Call::post(wire.url("/pay"))).await.unwrap();
        assert_eq!((done.status.as_u16(), done.answered.tries()), (500, 1));
    }
}

#[tokio::test]
async fn b108_a_server_that_is_down_is_tried_until_it_is_back() {
    for kind in BOTH {
        let address = closed();
        let call = Call::post(format!("http://{address}/pay"));
        let sent = tokio::spawn(send(kind, policy(), call));
        tokio::time::sleep(Duration::from_millis(60)).await;
        let wire = Wire::start_on(address, [created()]).await;
        let done = sent.await.unwrap().unwrap();
        assert!(done.answered.tries() > 1, "{kind:?}");
        assert_eq!(wire.received().len(), 1);
    }
}

#[tokio::test]
async fn b109_the_second_try_has_the_same_bytes() {
    let boundary = "multipart/form-data; boundary=X-17";
    let form = "--X-17\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n--X-17--\r\n";
    let large = Bytes::from(vec![0xA5; 300_000]);
    for kind in BOTH {
        for (media, body) in
            [("application/octet-stream", large.clone()), (boundary, Bytes::from(form))]
        {
            let wire = Wire::start([Act::ResetInBody, Act::Close, created()]).await;
            let call = Call::post(wire.url("/pay")).header("content-type", media);
            let done = send(kind, policy(), call.body(body.clone())).await.unwrap();
            assert_eq!(done.answered.tries(), 3, "{kind:?}");
            let received = wire.received();
            assert_eq!(received[0].head, received[2].head);
            assert_eq!(received[2].all("content-type"), [media]);
            assert_eq!((&received[1].body, &received[2].body), (&body.to_vec(), &body.to_vec()));
        }
    }
}

#[tokio::test]
async fn b109_a_stream_is_refused_before_anything_is_sent() {
    let wire = Wire::start([created()]).await;
    let frames = || {
        let frame = http_body::Frame::data(Bytes::from_static(b"{}"));
        futures_util::stream::iter([Ok::<_, std::io::Error>(frame)])
    };

    let client = tower::service_fn(async |_: Request<axum::body::Body>| {
        Ok::<_, std::io::Error>(http::Response::new(Full::<Bytes>::default()))
    });
    let body = axum::body::Body::new(StreamBody::new(frames()));
    let request = Request::post(wire.url("/pay")).body(body).unwrap();
    let error = RetryLayer::new(policy()).layer(client).oneshot(request).await.unwrap_err();
    assert_eq!((error.kind(), error.tries()), (&ClientErrorKind::StreamedBody, 0));
    assert!(error.is_safe_new_key());

    let body = reqwest::Body::wrap(StreamBody::new(frames()));
    let error = reqwest_client(policy()).post(wire.url("/pay")).body(body).send().await;
    let error = error.unwrap_err();
    let error = ClientError::in_middleware(&error).unwrap();
    assert_eq!((error.kind(), error.tries()), (&ClientErrorKind::StreamedBody, 0));
    assert!(error.to_string().contains("only once"), "{error}");

    // A key that was given may have been used before: it is not lost, and no other one is safe.
    let body = reqwest::Body::wrap(StreamBody::new(frames()));
    let request = reqwest_client(policy()).post(wire.url("/pay")).body(body);
    let error = request.header("idempotency-key", "order-17").send().await.unwrap_err();
    let error = ClientError::in_middleware(&error).unwrap();
    assert_eq!(error.key().map(|key| key.as_str()), Some("order-17"));
    assert!(!error.is_safe_new_key());
    let client = tower::service_fn(async |_: Request<axum::body::Body>| {
        Ok::<_, std::io::Error>(http::Response::new(Full::<Bytes>::default()))
    });
    let body = axum::body::Body::new(StreamBody::new(frames()));
    let request = Request::post(wire.url("/pay")).header("idempotency-key", "order-17");
    let request = request.body(body).unwrap();
    let error = RetryLayer::new(policy()).layer(client).oneshot(request).await.unwrap_err();
    assert_eq!(error.key().map(|key| key.as_str()), Some("order-17"));
    assert!(!error.is_safe_new_key());
    assert_eq!(wire.received().len(), 0);
}

/// A redirect of a POST says that it was received: that nobody is where it leads proves nothing.
#[tokio::test]
async fn b110_a_post_without_a_key_is_not_repeated_after_a_redirect_to_where_nobody_is() {
    for status in [302, 303] {
        let there = format!("http://{}/receipt", closed());
        let redirect = Act::Answer(answer(status, &[("location", &there)], ""));
        let wire = Wire::start([redirect.clone(), redirect.clone(), redirect]).await;
        let policy = policy().keys(Keys::OnlyGiven);
        let failed = send(Kind::Reqwest, policy, Call::post(wire.url("/pay"))).await.unwrap_err();
        assert_eq!((failed.kind, failed.tries), (ClientErrorKind::Failed, 1), "{status}");
        assert_eq!(wire.received().len(), 1, "{status}");
    }
}

#[tokio::test]
async fn b110_a_post_without_a_key_is_sent_once_unless_nothing_was_sent() {
    for kind in BOTH {
        for act in [Act::Close, Act::ResetInBody] {
            let wire = Wire::start([act, created()]).await;
            let policy = policy().keys(Keys::OnlyGiven);
            let failed = send(kind, policy, Call::post(wire.url("/pay"))).await.unwrap_err();
            assert_eq!((failed.kind, failed.tries), (ClientErrorKind::Failed, 1), "{kind:?}");
            assert_eq!(wire.received().len(), 1);
            assert!(wire.received()[0].all("idempotency-key").is_empty());
        }
        // An error status of a POST without a key is the caller's.
        let wire = Wire::start([Act::Answer(answer(503, &[], "")), created()]).await;
        let policy = policy().keys(Keys::OnlyGiven);
        let done = send(kind, policy.clone(), Call::post(wire.url("/pay"))).await.unwrap();
        assert_eq!((done.status.as_u16(), wire.received().len()), (503, 1));

        // A refused connection proves that nothing was sent, where no redirect can have led to it.
        let address = closed();
        if matches!(kind, Kind::Reqwest) {
            let call = Call::post(format!("http://{address}/pay"));
            let failed = send(kind, policy.clone(), call).await.unwrap_err();
            assert_eq!((failed.kind, failed.tries), (ClientErrorKind::Failed, 1));
            continue;
        }
        let call = Call::post(format!("http://{address}/pay"));
        let sent = tokio::spawn(send(kind, policy.clone(), call));
        tokio::time::sleep(Duration::from_millis(60)).await;
        let wire = Wire::start_on(address, [created()]).await;
        assert!(sent.await.unwrap().unwrap().answered.tries() > 1, "{kind:?}");
        assert_eq!(wire.received().len(), 1);
    }
}

#[tokio::test]
async fn b110_a_pooled_connection_that_closes_just_then_makes_no_second_post() {
    // One client over both requests, so that the second one goes over the connection of the first.
    let wire = Wire::start([created(), Act::Close, created()]).await;
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let client = RetryLayer::new(policy().keys(Keys::OnlyGiven)).layer(client);
    let request = || Request::post(wire.url("/pay")).body(Full::from("{}")).unwrap();
    let first = client.clone().oneshot(request()).await.unwrap();
    first.into_body().collect().await.unwrap();
    let error = client.oneshot(request()).await.unwrap_err();
    assert_eq!((error.kind(), error.tries()), (&ClientErrorKind::Failed, 1));
    assert!(std::error::Error::source(&error).is_some());
    assert_eq!(wire.received().len(), 2);
}

/// How long the client waited before its second try.
async fn waited(kind: Kind, headers: Vec<(&'static str, String)>) -> Duration {
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let wire = Wire::start([Act::Answer(answer(503, &headers, "")), created()]).await;
    let began = Instant::now();
    let policy = policy().longest_retry_after(Duration::from_secs(4));
    let done = send(kind, policy, Call::post(wire.url("/pay"))).await.unwrap();
    assert_eq!((done.status.as_u16(), wire.received().len()), (201, 2));
    began.elapsed()
}

#[tokio::test]
async fn b111_retry_after_is_waited_for_in_both_forms_up_to_a_cap() {
    let date = |seconds: u64| httpdate_in(Duration::from_secs(seconds));
    let hour = 3600;
    let cases = [
        (vec![("retry-after", "2".to_owned())], 2.0, 2.9),
        (vec![("retry-after", "0".to_owned())], 0.02, 0.9),
        (vec![("retry-after", "-5".to_owned())], 0.02, 0.9),
        (vec![("retry-after", "1.5".to_owned())], 0.02, 0.9),
        (vec![("retry-after", "soon".to_owned())], 0.02, 0.9),
        (vec![("retry-after", "99999999999999999999".to_owned())], 4.0, 4.9),
        // Dates are whole seconds, so up to one of them is already over.
        (vec![("retry-after", date(3))], 1.9, 3.9),
        (vec![("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT".to_owned())], 0.02, 0.9),
        (vec![("retry-after", "1".to_owned()), ("retry-after", "2".to_owned())], 2.0, 2.9),
        // The local clock is an hour behind.
        (vec![("retry-after", date(hour + 2)), ("date", date(hour))], 2.0, 2.9),
    ];
    let all = BOTH.into_iter().flat_map(|kind| {
        cases.iter().map(move |(headers, least, most)| async move {
            let waited = waited(kind, headers.clone()).await.as_secs_f64();
            assert!((*least..*most).contains(&waited), "{kind:?} {headers:?}: {waited} s");
        })
    });
    futures_util::future::join_all(all).await;
}

fn httpdate_in(time: Duration) -> String {
    httpdate::fmt_http_date(SystemTime::now() + time)
}

#[tokio::test]
async fn b111_the_deadline_holds_whatever_the_server_asks() {
    for kind in BOTH {
        let busy = problem(409, "key_in_use", true, Some("50"));
        let wire = Wire::start([busy]).await;
        let began = Instant::now();
        let policy = policy().within(Duration::from_secs(2));
        let failed = send(kind, policy, Call::post(wire.url("/pay"))).await.unwrap_err();
        assert_eq!(failed.kind, ClientErrorKind::GaveUp(GaveUp::Deadline));
        assert_eq!((failed.tries, failed.status), (1, Some(409)));
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_budget_that_is_empty_ends_the_retries_and_fills_up_with_answers() {
    for kind in BOTH {
        let down = || Act::Answer(answer(503, &[], ""));
        let wire = Wire::start([down(), down(), down(), created(), down(), created()]).await;
        let policy = policy().budget(RetryBudget::of(2));
        let call = || Call::post(wire.url("/pay"));
        let failed = send(kind, policy.clone(), call()).await.unwrap_err();
        let expect = (ClientErrorKind::GaveUp(GaveUp::Budget), 3);
        assert_eq!((failed.kind, failed.tries), expect, "{kind:?}");
        assert_eq!(send(kind, policy.clone(), call()).await.unwrap().answered.tries(), 1);
        assert_eq!(send(kind, policy, call()).await.unwrap().answered.tries(), 2);
    }
}

#[tokio::test]
async fn b112_every_method_sends_its_key_exactly_once_on_every_try() {
    for kind in BOTH {
        for method in [Method::POST, Method::PATCH, Method::PUT, Method::DELETE] {
            let wire = Wire::start([Act::Close, Act::ResetInBody, created()]).await;
            let mut call = Call::new(method.clone(), wire.url("/pay"));
            if !matches!(method, Method::POST | Method::PATCH) {
                call = call.key("given");
            }
            let done = send(kind, policy(), call).await.unwrap();
            let received = wire.received();
            assert_eq!(received.len(), 3, "{kind:?} {method}");
            let key = done.answered.key().unwrap().as_str();
            assert!(received.iter().all(|one| one.key() == key), "{kind:?} {method}");
        }
        // Safe methods have no key, and are tried again all the same.
        let wire = Wire::start([Act::Close, created()]).await;
        let done = send(kind, policy(), Call::new(Method::GET, wire.url("/pay"))).await.unwrap();
        assert!(done.answered.key().is_none());
        assert!(wire.received().iter().all(|one| one.all("idempotency-key").is_empty()));
    }
}

#[tokio::test]
async fn b112_two_keys_or_a_malformed_one_are_refused_before_anything_is_sent() {
    for kind in BOTH {
        let wire = Wire::start([created()]).await;
        for call in [
            Call::post(wire.url("/pay")).key("a").key("b"),
            Call::post(wire.url("/pay")).key("with space"),
        ] {
            let failed = send(kind, policy(), call).await.unwrap_err();
            assert!(matches!(failed.kind, ClientErrorKind::BadKey(_)), "{failed:?}");
        }
        assert_eq!(wire.received().len(), 0, "{kind:?}");
    }
}

#[tokio::test]
async fn b112_the_key_survives_redirects_and_proxies() {
    let target = Wire::start([Act::Close, created()]).await;
    for status in [307, 308] {
        let to = target.url("/moved");
        let first = Wire::start([Act::Answer(answer(status, &[("location", &to)], ""))]).await;
        let done = send(Kind::Reqwest, policy(), Call::post(first.url("/pay")).key("k")).await;
        assert_eq!(done.unwrap().status, 201);
        assert!(first.received().iter().all(|one| one.key() == "k"));
    }
    assert_eq!(target.received().len(), 3);
    for one in target.received() {
        assert_eq!((one.key().as_str(), one.body.is_empty()), ("k", false));
    }

    let proxy = Wire::start([Act::Close, created()]).await;
    let through = reqwest::Proxy::http(proxy.url("")).unwrap();
    let client = reqwest::Client::builder().proxy(through).build().unwrap();
    let client =
        reqwest_middleware::ClientBuilder::new(client).with(RetryMiddleware::new(policy())).build();
    let response = client.post("http://payments.test/pay").body("{}").send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.url().path()), (201, "/pay"));
    let keys: Vec<_> = proxy.received().iter().map(|one| one.key()).collect();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
    assert!(proxy.received()[0].head.starts_with("POST http://payments.test/pay"));
}

#[tokio::test]
async fn an_answer_longer_than_the_limit_and_a_stream_are_passed_on_whole() {
    let long = "x".repeat(100_000);
    for kind in BOTH {
        let events = [("content-type", "text/event-stream")];
        for headers in [&[][..], &events] {
            let wire = Wire::start([Act::Answer(answer(200, headers, &long))]).await;
            let policy = policy().answer_limit(1000);
            let done = send(kind, policy, Call::post(wire.url("/pay"))).await.unwrap();
            assert_eq!(done.body, long, "{kind:?}");
        }
    }
}
