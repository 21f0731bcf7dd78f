//! The router: the same functions over HTTP.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;
use tower_idempotency::admin::{Operator, Who, router};
use tower_idempotency::{DownstreamSeed, IdempotencyKey, MemoryStore};

use super::{claimed, example, key, unknown};

struct Desk {
    store: Arc<MemoryStore>,
    router: Router,
}

struct Reply {
    status: StatusCode,
    body: Value,
}

impl Desk {
    fn new() -> Self {
        let store = Arc::new(MemoryStore::new());
        let authenticate = async |mut request: Request, next: Next| {
            request.extensions_mut().insert(Who::new("ana").unwrap());
            next.run(request).await
        };
        let router = router(Operator::new(Arc::clone(&store))).layer(from_fn(authenticate));
        Self { store, router }
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>) -> Reply {
        send(&self.router, method, path, body, &[]).await
    }

    async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, None).await
    }

    async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(Method::POST, path, Some(body)).await
    }
}

async fn send(
    router: &Router,
    method: Method,
    path: &str,
    body: Option<Value>,
    headers: &[(&str, &str)],
) -> Reply {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = match body {
        Some(body) => {
            let request = request.header("content-type", "application/json");
            request.body(Body::from(body.to_string()))
        }
        None => request.body(Body::empty()),
    };
    let response = router.clone().oneshot(request.unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    if head.status != StatusCode::UNAUTHORIZED {
        assert_eq!(head.headers["cache-control"], "no-store", "{path}");
    }
    let body = body.collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if !head.status.is_success() && body != Value::Null {
        assert_eq!(head.headers["content-type"], "application/problem+json", "{path}");
        assert_eq!(body["status"], head.status.as_u16());
    }
    Reply { status: head.status, body }
}

impl Reply {
    #[track_caller]
    fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    #[track_caller]
    fn refused(self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), self.body["code"].as_str()), (status, Some(code)));
    }
}

#[tokio::test]
async fn the_router_looks_up_lists_settles_forgets_and_tells_the_trail() {
    let desk = Desk::new();
    let key = unknown(&*desk.store, "order-17").await;
    let reference = key.log_id();
    let listed = desk.get("/records").await.ok();
    assert_eq!(listed["records"][0]["reference"], reference);
    assert_eq!(listed["index"]["kind"], "direct");
    let found = desk.post("/lookup", json!({"account": ["acme"], "key": "order-17"})).await.ok();
    assert_eq!(found["reference"], reference);
    assert_eq!(
        (&found["state"], &found["outcome_unknown"]),
        (&json!("indeterminate"), &json!(true))
    );

    assert_eq!(found.get("downstream_keys"), None, "nobody asked for them");
    let asked = json!({"account": ["acme"], "key": "order-17", "downstream": ["refund", "charge"]});
    let asked = desk.post("/lookup", asked).await.ok();
    let seed = DownstreamSeed::new(&"acme".into(), &IdempotencyKey::new("order-17").unwrap());
    let keys = json!({"charge": seed.key_for("charge"), "refund": seed.key_for("refund")});
    assert_eq!(asked["downstream_keys"], keys);
    let nameless = json!({"account": ["acme"], "key": "order-17", "downstream": [""]});
    desk.post("/lookup", nameless).await.refused(400, "malformed");

    let settle = format!("/records/{reference}/settle");
    let body = json!({
        "version": found["version"], "why": "T-17", "outcome": "done",
        "response": {"status": 201, "headers": [["location", "/p/1"]], "body": "{\"id\": 1}"},
    });
    let made = desk.post(&settle, body.clone()).await.ok();
    assert_eq!(made["outcome_noted"], true);
    desk.post(&settle, body).await.refused(409, "changed");

    let path = format!("/records/{}", key.to_text());
    let facts = desk.get(&path).await.ok();
    assert_eq!((&facts["state"], &facts["status"]), (&json!("completed"), &json!(201)));
    let again = json!({"version": facts["version"], "why": "T-17", "outcome": "not_applied"});
    let again = desk.post(&settle, again).await;
    let told = again.body["detail"].as_str().unwrap().to_owned();
    assert!(told.contains("it is completed with 201; nothing was changed"), "{told}");
    again.refused(409, "not_unknown");
    assert_eq!(facts.get("response"), None, "bodies are shown to who asks for them");
    let contents = desk.get(&format!("{path}?contents=true")).await.ok();
    assert_eq!(contents["response"]["body"], "{\"id\": 1}");
    assert_eq!(contents["response"]["headers"], json!([["location", "/p/1"]]));

    let forget = json!({"version": facts["version"], "why": "a test order"});
    desk.post(&format!("{path}/forget"), forget).await.ok();
    desk.get(&path).await.refused(404, "not_found");
    let trail = desk.get("/trail").await.ok();
    let actions: Vec<_> =
        trail["changes"].as_array().unwrap().iter().map(|c| &c["action"]).collect();
    assert_eq!(actions, ["forget", "settle done"]);
    assert_eq!(trail["changes"][1]["change"], made["change"]);
    assert_eq!(trail["changes"][1]["who"], "ana");
}

#[tokio::test]
async fn the_router_lists_page_by_page() {
    let desk = Desk::new();
    for number in 0..5 {
        unknown(&*desk.store, &number.to_string()).await;
    }
    let _running = claimed(&*desk.store, key("running")).await;
    let mut seen = Vec::new();
    let mut path = "/records?limit=2".to_owned();
    loop {
        let page = desk.get(&path).await.ok();
        let records = page["records"].as_array().unwrap();
        seen.extend(records.iter().map(|record| record["reference"].to_string()));
        match page["next_page"].as_str() {
            Some(next) => path = format!("/records?limit=2&page={next}"),
            None => break,
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 5);
    let running = desk.get("/records?list=in_flight").await.ok();
    assert_eq!(running["records"][0]["summary"], "in flight");
    let old = desk.get("/records?list=in_flight&older_than_seconds=60").await.ok();
    assert_eq!(old["records"], json!([]));
}

#[tokio::test]
async fn the_router_refuses_who_is_nobody_and_what_makes_no_sense() {
    let bare = router(Operator::new(MemoryStore::new()));
    for (method, path) in [
        (Method::GET, "/records"),
        (Method::GET, "/trail"),
        (Method::POST, "/records/x/forget"),
        (Method::GET, "/nothing"),
    ] {
        let reply = send(&bare, method, path, None, &[]).await;
        reply.refused(401, "operator_unknown");
    }

    let desk = Desk::new();
    let key = unknown(&*desk.store, "k").await;
    let path = format!("/records/{}", key.to_text());
    let version = desk.get(&path).await.ok()["version"].clone();
    let settle = format!("{path}/settle");
    for body in [
        json!({}),
        json!({"version": version, "why": " ", "outcome": "not_applied"}),
        json!({"version": version, "why": "a\nb", "outcome": "not_applied"}),
        json!({"version": version, "outcome": "not_applied"}),
        json!({"version": "latest", "why": "x", "outcome": "not_applied"}),
        json!({"version": version, "why": "x", "outcome": "done"}),
        json!({"version": version, "why": "x", "outcome": "done", "response": {"status": 99}}),
        json!({"version": version, "why": "x", "outcome": "not_applied", "response": {"status": 201}}),
        json!({"version": version, "why": "x", "outcome": "done", "responses": {"status": 201}}),
    ] {
        desk.post(&settle, body).await.refused(400, "malformed");
    }
    for status in [100, 204, 429, 600] {
        let response = json!({"status": status, "body": "x"});
        let body = json!({"version": version, "why": "x", "outcome": "done", "response": response});
        desk.post(&settle, body).await.refused(400, "answer_refused");
    }
    desk.get("/records?page=whatever").await.refused(400, "no_page");
    desk.get("/records?lists=unknown").await.refused(400, "malformed");
    desk.get("/records/whatever").await.refused(400, "malformed");
    desk.get("/records/000000000000").await.refused(404, "not_found");
    desk.post("/lookup", json!({"key": "k"})).await.refused(400, "malformed");
    desk.post("/lookup", json!({"account": ["acme"], "key": "no"})).await.refused(404, "not_found");
    desk.get("/nothing").await.refused(404, "no_such_route");

    // A page of another origin can send these without being asked, and GETs.
    for media_type in ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"] {
        let request = Request::post(&settle).header("content-type", media_type);
        let body = json!({"version": version, "why": "x", "outcome": "not_applied"}).to_string();
        let request = request.body(Body::from(body)).unwrap();
        let response = desk.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 415, "{media_type}");
    }
    assert_eq!(desk.get(&settle).await.status, 405);
    assert_eq!(desk.get(&path).await.ok()["version"], version, "something was changed");
}

#[tokio::test]
async fn the_example_settles_what_its_payment_does_not_know() {
    let app = example::app().unwrap();
    let pay = [("idempotency-key", "k1")];
    let ana = [("authorization", "Bearer ana-secret")];
    let paid = async || {
        let mut request = Request::post("/payments");
        for (name, value) in pay {
            request = request.header(name, value);
        }
        let request = request.body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap()
    };
    assert_eq!(paid().await.status(), 502);
    assert_eq!(paid().await.status(), 409);
    let stranger = send(&app, Method::GET, "/operators/records", None, &[]).await;
    assert_eq!(stranger.status, 401);
    let listed = send(&app, Method::GET, "/operators/records", None, &ana).await.ok();
    let record = &listed["records"][0];
    let path = format!("/operators/records/{}/settle", record["reference"].as_str().unwrap());
    let body = json!({
        "version": record["version"], "why": "T-1: paid, says the bank", "outcome": "done",
        "response": {"status": 201, "headers": [["content-type", "text/plain"]], "body": "paid\n"},
    });
    send(&app, Method::POST, &path, Some(body), &ana).await.ok();
    let replayed = paid().await;
    assert_eq!(
        (replayed.status(), &replayed.headers()["idempotent-replayed"]),
        (StatusCode::CREATED, &"true".parse().unwrap())
    );
    assert_eq!(replayed.headers()["content-type"], "text/plain");
    let body = replayed.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "paid\n");
}
