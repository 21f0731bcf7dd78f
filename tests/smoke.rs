//! The layer in an axum router.
use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;
use tower_idempotency::*;

async fn send(app: &Router, key: Option<&str>, body: &str) -> (StatusCode, http::HeaderMap, String) {
    let mut b = Request::post("/pay");
    if let Some(k) = key {
        b = b.header("idempotency-key", k);
    }
    let res: Response<Body> = app.clone().oneshot(b.body(Body::from(body.to_owned())).unwrap()).await.unwrap();
    let (p, b) = res.into_parts();
    let bytes = b.collect().await.unwrap().to_bytes();
    (p.status, p.headers, String::from_utf8_lossy(&bytes).into_owned())
}

#[tokio::test]
async fn smoke() {
    let layer = IdempotencyLayer::new(
        Config::builder().scope(Scope::global()).build().unwrap(),
        MemoryStore::new(),
    );
    let n = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let app = Router::new()
        .route("/pay", post(move |e: Execution, body: String| { let n = n.clone(); async move {
            if body == "panic" { panic!("x") }
            let n = n.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            (StatusCode::CREATED, format!("{body}-{n}-{}", e.attempt().number()))
        }}))
        .layer(layer);
    dbg!(send(&app, Some("a"), "x").await);
    dbg!(send(&app, Some("a"), "x").await);
    dbg!(send(&app, Some("a"), "y").await);
    dbg!(send(&app, None, "y").await);
    dbg!(send(&app, Some("p"), "panic").await);
    dbg!(send(&app, Some("p"), "panic").await);
}
