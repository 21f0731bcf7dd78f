//! Keys from elsewhere than a header, and when two requests are the same: from outside, through
//! the whole layer.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::post;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, Request, StatusCode};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;
use tower_idempotency::{
    Config, ConfigBuilder, Execution, IDEMPOTENCY_KEY, IdempotencyLayer, JsonPointer, MemoryStore,
    MissingKey, Recipe, Scope, Store,
};

/// A route behind the layer, and how often its handler ran.
#[derive(Clone)]
struct Shop {
    store: Arc<dyn Store>,
    app: Router,
    runs: Arc<AtomicUsize>,
}

impl Shop {
    fn new(rules: ConfigBuilder) -> Self {
        Self::on(Arc::new(MemoryStore::new()), Arc::default(), rules)
    }

    fn on(store: Arc<dyn Store>, runs: Arc<AtomicUsize>, rules: ConfigBuilder) -> Self {
        let layer = IdempotencyLayer::new(rules.build().unwrap(), Arc::clone(&store));
        let app = Router::new().route("/pay", post(pay)).layer(DefaultBodyLimit::disable());
        let app = app.layer(layer);
        Self { store, app: app.with_state(Arc::clone(&runs)), runs }
    }

    /// The same store and ledger under other rules, as after a deploy.
    fn deployed(&self, rules: ConfigBuilder) -> Self {
        Self::on(Arc::clone(&self.store), Arc::clone(&self.runs), rules)
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    async fn send(&self, ask: Ask<'_>) -> Got {
        let mut request = Request::post("/pay").header(CONTENT_TYPE, ask.content_type);
        for (name, value) in ask.headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(ask.body.to_owned())).unwrap();
        let (head, body) = self.app.clone().oneshot(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let text = |name: &str| head.headers.get(name).map(|it| it.to_str().unwrap().to_owned());
        Got {
            status: head.status,
            replay: text("idempotent-replayed").as_deref() == Some("true"),
            key: text("idempotency-key"),
            body,
        }
    }

    async fn json(&self, body: &str) -> Got {
        self.send(Ask { body, ..Ask::default() }).await
    }

    async fn keyed(&self, content_type: &str, body: &str) -> Got {
        self.send(Ask { content_type, body, headers: &[("idempotency-key", "k")] }).await
    }
}

async fn pay(State(runs): State<Arc<AtomicUsize>>, _: Option<Execution>, body: Bytes) -> String {
    let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
    format!("run {run} with {} bytes", body.len())
}

struct Ask<'a> {
    content_type: &'a str,
    headers: &'a [(&'a str, &'a str)],
    body: &'a str,
}

impl Default for Ask<'_> {
    fn default() -> Self {
        Self { content_type: "application/json", headers: &[], body: "" }
    }
}

#[derive(Debug)]
struct Got {
    status: StatusCode,
    replay: bool,
    key: Option<String>,
    body: Bytes,
}

impl Got {
    #[track_caller]
    fn ran(&self) {
        assert_eq!((self.status, self.replay), (StatusCode::OK, false), "{self:?}");
    }

    #[track_caller]
    fn replayed(&self) {
        assert_eq!((self.status, self.replay), (StatusCode::OK, true), "{self:?}");
    }

    #[track_caller]
    fn refused(&self, status: u16, code: &str) {
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        let code = format!("idempotency_{code}");
        assert_eq!((self.status.as_u16(), body["code"].as_str()), (status, Some(code.as_str())));
    }

    /// What a refusal says.
    fn detail(&self) -> String {
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        body["detail"].as_str().unwrap().to_owned()
    }
}

fn rules() -> ConfigBuilder {
    Config::builder().scope(Scope::global())
}

fn from_body() -> ConfigBuilder {
    rules().key_from_body(JsonPointer::from_static("/idempotency_key"))
}

// ---- The key in the body

#[tokio::test]
async fn a_key_in_the_body_protects_as_one_in_a_header_does() {
    let shop = Shop::new(from_body());
    let body = r#"{"idempotency_key":"a key, with \"quotes\"","amount":1}"#;
    let first = shop.json(body).await;
    first.ran();
    assert_eq!(first.key.as_deref(), Some(r#""a key, with \"quotes\"""#), "echoed, in quotes");
    shop.json(body).await.replayed();
    shop.json(&body.replace(":1", ":2")).await.refused(422, "key_reused");
    shop.json(r#"{"idempotency_key":"other","amount":1}"#).await.ran();
    assert_eq!(shop.runs(), 2);
}

#[tokio::test]
async fn header_and_body_may_both_carry_the_key_if_it_is_one() {
    let shop = Shop::new(from_body());
    let body = r#"{"idempotency_key":"k"}"#;
    let ask = |headers| Ask { headers, body, ..Ask::default() };
    shop.send(ask(&[("idempotency-key", "k")])).await.ran();
    shop.send(ask(&[("idempotency-key", "\"k\"")])).await.replayed();
    shop.send(ask(&[])).await.replayed();
    shop.send(ask(&[("idempotency-key", "other")])).await.refused(400, "key_invalid");
    let only = Ask { headers: &[("idempotency-key", "k2")], body: "{}", ..Ask::default() };
    shop.send(only).await.ran();
}

#[tokio::test]
async fn what_is_no_key_in_the_body_is_refused_and_what_is_none_is_missing() {
    let shop = Shop::new(from_body());
    let long = format!(r#"{{"idempotency_key":"{}"}}"#, "k".repeat(256));
    for invalid in [
        r#"{"idempotency_key":1}"#,
        r#"{"idempotency_key":["k"]}"#,
        r#"{"idempotency_key":""}"#,
        r#"{"idempotency_key":"é"}"#,
        r#"{"idempotency_key":"a\u0000"}"#,
        r#"{"idempotency_key":"k","idempotency_key":"l"}"#,
        r#"{"idempotency_key":"k","more":{"a":1,"a":2}}"#,
        &long,
    ] {
        shop.json(invalid).await.refused(400, "key_invalid");
    }
    for missing in
        ["{}", r#"{"idempotency_key":null}"#, r#"{"a":{"idempotency_key":"k"}}"#, "{", ""]
    {
        let got = shop.json(missing).await;
        got.refused(400, "key_missing");
        // Whoever sent it somewhere else is told where it was looked for.
        for place in ["idempotency-key", "/idempotency_key", "application/json"] {
            assert!(got.detail().contains(place), "{place} in {}", got.detail());
        }
    }
    let other =
        Ask { content_type: "text/plain", body: r#"{"idempotency_key":"k"}"#, headers: &[] };
    shop.send(other).await.refused(400, "key_missing");
    assert_eq!(shop.runs(), 0);
}

#[tokio::test]
async fn where_it_is_optional_a_request_without_a_key_runs_with_its_whole_body() {
    let shop = Shop::new(from_body().missing_key(MissingKey::PassThrough));
    for run in 1..=2 {
        let got = shop.json(r#"{"amount":1}"#).await;
        assert_eq!(got.body, format!("run {run} with 12 bytes"));
        assert_eq!(got.key, None);
    }
    shop.json(r#"{"idempotency_key":7}"#).await.refused(400, "key_invalid");
    let keyed = r#"{"idempotency_key":"k"}"#;
    shop.json(keyed).await.ran();
    shop.json(keyed).await.replayed();

    let unknown = || Scope::principal(|_: &http::request::Parts| None::<String>);
    let optional = || from_body().missing_key(MissingKey::PassThrough).scope(unknown());
    let shop = Shop::new(optional());
    shop.json("{}").await.ran();
    shop.json(keyed).await.refused(401, "scope_missing");
    Shop::new(from_body().scope(unknown())).json(keyed).await.refused(401, "scope_missing");
}

/// Handlers skip members that they do not know, whatever is in them: such a body is a payment.
#[tokio::test]
async fn a_body_that_cannot_be_read_to_its_end_never_runs_without_its_key() {
    let shop = Shop::new(from_body().missing_key(MissingKey::PassThrough));
    let deep = "[".repeat(127) + &"]".repeat(127);
    // Each refusal says what it is that cannot be read, and of several only what is true.
    let reasons =
        ["half of a surrogate", "greater than a double", "127 levels", "twice", "reserved"];
    for (value, reason) in [
        (r#""cut \ud83d""#, reasons[0]),
        ("1e400", reasons[1]),
        (&deep, reasons[2]),
        (r#"{"a":1,"a":2}"#, reasons[3]),
        (r#"{"$serde_json::private::RawValue":"1"}"#, reasons[4]),
        (r#"{"\u0024serde_json::private::Number":"1"}"#, reasons[4]),
    ] {
        let body = format!(r#"{{"idempotency_key":"k","amount":5,"note":{value}}}"#);
        let got = shop.json(&body).await;
        got.refused(400, "key_invalid");
        let said = got.detail();
        let named: Vec<_> = reasons.into_iter().filter(|reason| said.contains(reason)).collect();
        assert_eq!(named, [reason], "{said}");
    }
    let hidden = r#"{"$serde_json::private::RawValue":"{\"idempotency_key\":\"k\"}"}"#;
    shop.json(hidden).await.refused(400, "key_invalid");
    assert_eq!(shop.runs(), 0);
}

// ---- The key from the content

const WINDOW: Duration = Duration::from_millis(600);

fn from_content() -> ConfigBuilder {
    rules().key_from_content(WINDOW).lease(Duration::from_millis(300))
}

#[tokio::test]
async fn equal_requests_within_the_window_are_one_and_later_ones_are_new() {
    let shop = Shop::new(from_content());
    let first = shop.json(r#"{"amount":1}"#).await;
    first.ran();
    assert_eq!(first.key.as_ref().map(String::len), Some(64));
    let again = shop.json(r#"{"amount":1}"#).await;
    again.replayed();
    assert_eq!(again.key, first.key);
    shop.json(r#"{"amount":2}"#).await.ran();
    shop.json(r#"{ "amount":1}"#).await.ran();
    tokio::time::sleep(WINDOW + Duration::from_millis(150)).await;
    shop.json(r#"{"amount":1}"#).await.ran();
    assert_eq!(shop.runs(), 4);
}

#[tokio::test]
async fn a_key_that_is_given_counts_more_than_the_content() {
    let shop = Shop::new(from_content());
    for key in ["one", "two"] {
        let headers = [("idempotency-key", key)];
        let ask = || Ask { headers: &headers, body: "{}", ..Ask::default() };
        shop.send(ask()).await.ran();
        shop.send(ask()).await.replayed();
    }
    shop.json("{}").await.ran();
    assert_eq!(shop.runs(), 3);
}

#[tokio::test]
async fn fifty_equal_requests_at_once_run_once() {
    let shop = Shop::new(from_content());
    let all = (0..50).map(|_| shop.json(r#"{"amount":1}"#));
    let got = futures_util::future::join_all(all).await;
    assert!(got.iter().all(|got| got.status == 200));
    assert_eq!((got.iter().filter(|got| !got.replay).count(), shop.runs()), (1, 1));
}

#[tokio::test]
async fn two_names_of_one_header_are_accepted_and_must_agree() {
    let vendor = HeaderName::from_static("paypal-request-id");
    let shop = Shop::new(rules().key_headers([IDEMPOTENCY_KEY, vendor]));
    let ask = |headers| Ask { headers, body: "{}", ..Ask::default() };
    shop.send(ask(&[("paypal-request-id", "k")])).await.ran();
    shop.send(ask(&[("idempotency-key", "k")])).await.replayed();
    shop.send(ask(&[("idempotency-key", "k"), ("paypal-request-id", "k")])).await.replayed();
    let differ = ask(&[("idempotency-key", "k"), ("paypal-request-id", "l")]);
    shop.send(differ).await.refused(400, "key_invalid");
}

// ---- What is the same request

const FORM: &str = "application/x-www-form-urlencoded";
const JSON: &str = "application/json";

#[tokio::test]
async fn the_same_in_other_bytes_is_a_replay_where_asked_and_422_by_default() {
    let multipart = |boundary: &str| {
        let body = format!("--{boundary}\r\na: b\r\n\r\nfile\r\n--{boundary}--\r\n");
        (format!("multipart/form-data; boundary={boundary}"), body)
    };
    let (one, two) = (multipart("one"), multipart("two"));
    let pairs = [
        ((JSON, r#"{"a":1,"b":2}"#), (JSON, "{ \"b\": 2,\n\"a\": 1 }")),
        (
            (JSON, r#"{"a":1,"to":{"bank":{"iban":"x","bic":"y"},"lines":[{"n":1,"m":2}]}}"#),
            (JSON, r#"{"to":{"lines":[{"m":2,"n":1}],"bank":{"bic":"y","iban":"x"}},"a":1}"#),
        ),
        ((JSON, r#"{"a":1}"#), ("application/json; charset=utf-8", r#"{"a":1.0}"#)),
        ((FORM, "a=x+y&b=1"), (FORM, "b=1&a=x%20y")),
        ((one.0.as_str(), one.1.as_str()), (two.0.as_str(), two.1.as_str())),
    ];
    for ((first_type, first), (second_type, second)) in pairs {
        let patient = Recipe::new().canonical_json().canonical_form().multipart_parts();
        let shop = Shop::new(rules().fingerprint(patient));
        shop.keyed(first_type, first).await.ran();
        shop.keyed(second_type, second).await.replayed();
        let strict = Shop::new(rules());
        strict.keyed(first_type, first).await.ran();
        strict.keyed(second_type, second).await.refused(422, "key_reused");
    }
}

/// Fault B71: only what says that it is JSON is read as JSON.
#[tokio::test]
async fn what_is_no_json_by_its_type_is_compared_byte_for_byte_in_canonical_mode_too() {
    let (one, other) = (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#);
    for content_type in ["text/plain", "text/plain; charset=utf-8", "application/jsonl", FORM, ""] {
        let shop = Shop::new(rules().fingerprint(Recipe::new().canonical_json()));
        shop.keyed(content_type, one).await.ran();
        shop.keyed(content_type, one).await.replayed();
        shop.keyed(content_type, other).await.refused(422, "key_reused");
        assert_eq!(shop.runs(), 1);
    }
    // The order of a form's fields is that of bytes as well, unless forms are read.
    let shop = Shop::new(rules().fingerprint(Recipe::new().canonical_json()));
    shop.keyed(FORM, "a=1&b=2").await.ran();
    shop.keyed(FORM, "b=2&a=1").await.refused(422, "key_reused");
}

/// A multipart body of these parts, and its type.
fn multipart(boundary: &str, parts: &[(&str, &str)]) -> (String, String) {
    let mut body = String::new();
    for (name, content) in parts {
        body += &format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{content}\r\n"
        );
    }
    body += &format!("--{boundary}--\r\n");
    (format!("multipart/form-data; boundary={boundary}"), body)
}

/// Fault B73: the boundary alone does not count; the parts, what is in them and their order do.
#[tokio::test]
async fn a_multipart_body_is_its_parts_in_their_order_however_large() {
    // Five megabytes, with lines in it that look like other boundaries.
    let scan = "--two\r\n--one-\r\nall work and no play\r\n".repeat(5_000_000 / 40);
    let patched = format!("{}!", &scan[..scan.len() - 1]);
    let first = [("amount", "5"), ("scan", scan.as_str())];
    let send = async |shop: &Shop, boundary: &str, parts: &[(&str, &str)]| {
        let (media_type, body) = multipart(boundary, parts);
        shop.keyed(&media_type, &body).await
    };
    let large = || rules().request_limit(8 << 20);
    let patient = Shop::new(large().fingerprint(Recipe::new().multipart_parts()));
    send(&patient, "boundary-1", &first).await.ran();
    send(&patient, "boundary-2", &first).await.replayed();
    for other in [
        [("scan", scan.as_str()), ("amount", "5")],
        [("amount", "5"), ("scan", patched.as_str())],
        [("amount", "6"), ("scan", scan.as_str())],
        [("amount", "5"), ("photo", scan.as_str())],
    ] {
        send(&patient, "boundary-1", &other).await.refused(422, "key_reused");
        send(&patient, "boundary-3", &other).await.refused(422, "key_reused");
    }
    send(&patient, "boundary-1", &first[..1]).await.refused(422, "key_reused");
    send(&patient, "boundary-3", &first).await.replayed();
    assert_eq!(patient.runs(), 1);

    let strict = Shop::new(large());
    send(&strict, "boundary-1", &first).await.ran();
    send(&strict, "boundary-2", &first).await.refused(422, "key_reused");
    send(&strict, "boundary-1", &first).await.replayed();
}

#[tokio::test]
async fn what_a_parser_would_lose_is_compared_byte_for_byte() {
    for (first, second) in [
        (r#"{"amount":1,"amount":2}"#, r#"{"amount":2}"#),
        (r#"{"amount":9007199254740993}"#, r#"{"amount":9007199254740992}"#),
        (r#"{"note":"\ud800"}"#, r#"{"note":"\ud801"}"#),
        ("{", "{ "),
        (
            r#"{"a":{"$serde_json::private::RawValue":"9007199254740993"}}"#,
            r#"{"a":{"$serde_json::private::RawValue":"9007199254740992"}}"#,
        ),
        (r#"{"a":{"$serde_json::private::RawValue":"5"}}"#, r#"{"a":5}"#),
        (r#"{"\u0024serde_json::private\u003a:RawValue":"5"}"#, "5"),
        (r#"{"$serde_json::private::Number":"5"}"#, "5"),
        ("[1,2]", "[2,1]"),
    ] {
        let shop = Shop::new(rules().fingerprint(Recipe::new().canonical_json()));
        shop.keyed(JSON, first).await.ran();
        shop.keyed(JSON, first).await.replayed();
        shop.keyed(JSON, second).await.refused(422, "key_reused");
    }
}

#[tokio::test]
async fn excluded_fields_may_differ_and_a_misspelt_one_is_found() {
    let pointer = JsonPointer::from_static;
    let recipe = Recipe::new()
        .canonical_json()
        .exclude(pointer("/sent_at"))
        .exclude(pointer("/auth/token"))
        .exclude(pointer("/amunt"));
    let shop = Shop::new(rules().fingerprint(recipe.clone()));
    shop.keyed(JSON, r#"{"amount":1,"sent_at":1,"auth":{"token":"a"}}"#).await.ran();
    shop.keyed(JSON, r#"{"amount":1,"sent_at":2,"auth":{"token":"b"}}"#).await.replayed();
    let other = r#"{"amount":2,"sent_at":1,"auth":{"token":"a"}}"#;
    shop.keyed(JSON, other).await.refused(422, "key_reused");
    let never: Vec<_> = recipe.never_matched().map(JsonPointer::as_str).collect();
    assert_eq!(never, ["/amunt"]);
}

// ---- Rotation

#[tokio::test]
async fn a_new_secret_or_another_recipe_gives_no_false_mismatch_while_the_old_one_is_accepted() {
    let keyed = |id: &'static str| Recipe::new().keyed(id, format!("secret {id}").as_bytes());
    let steps: [(Recipe, Recipe); 4] = [
        (keyed("2026-11"), keyed("2026-12")),
        (Recipe::new(), Recipe::new().canonical_json()),
        (Recipe::new(), keyed("2026-12")),
        (
            Recipe::new().canonical_json(),
            Recipe::new().canonical_json().exclude(JsonPointer::from_static("/sent_at")),
        ),
    ];
    for (old, new) in steps {
        let (body, other) = (r#"{"amount":1}"#, r#"{"amount":2}"#);
        let before = Shop::new(rules().fingerprint(old.clone()));
        before.keyed(JSON, body).await.ran();

        let after = before.deployed(rules().fingerprint(new.clone()).also_accept(old.clone()));
        after.keyed(JSON, body).await.replayed();
        after.keyed(JSON, other).await.refused(422, "key_reused");
        // Written by the new one already: servers of both releases agree, if the old one accepts.
        let fresh = [("idempotency-key", "fresh")];
        let ask = || Ask { headers: &fresh, body, ..Ask::default() };
        after.send(ask()).await.ran();
        let still_old = before.deployed(rules().fingerprint(old).also_accept(new.clone()));
        still_old.send(ask()).await.replayed();

        // Accepted no more: nobody can tell, so nothing runs and nothing is refused as another.
        let forgotten = before.deployed(rules().fingerprint(new));
        forgotten.keyed(JSON, body).await.refused(503, "record_unreadable");
        assert_eq!(before.runs(), 2);
    }
}
