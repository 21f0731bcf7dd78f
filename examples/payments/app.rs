//! The routes, and what stands around them: authentication outside, idempotency inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use tower_http::catch_panic::CatchPanicLayer;
use tower_idempotency::{Engine, IdempotencyLayer, Store};

use crate::account::authenticate;
use crate::answer::ApiError;
use crate::flags::Rules;
use crate::ledger::Ledger;
use crate::payments::{create, ledger, list, refund, show, void};
use crate::store::chain;
use crate::stripe::{
    create_charge, create_intent, create_refund, show_charge, show_intent, show_refund,
};

/// What the handlers share.
#[derive(Clone, Debug)]
pub(crate) struct App {
    pub(crate) ledger: Ledger,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) metrics: PrometheusHandle,
    pub(crate) engine: Engine,
    pub(crate) draining: Arc<AtomicBool>,
}

/// How long the store may take to say that it is ready.
const READY_WITHIN: Duration = Duration::from_secs(2);

/// The whole API.
pub(crate) fn router(app: App, rules: Rules, idempotency: &IdempotencyLayer) -> Router {
    let payments = Router::new()
        .route("/v1/payments", post(create).get(list))
        .route("/v1/payments/{id}/refunds", post(refund))
        .route_layer(from_fn_with_state(app.clone(), refuse_while_draining))
        .route_layer(idempotency.clone());
    let stripe = Router::new()
        .route("/v1/payment_intents", post(create_intent))
        .route("/v1/payment_intents/{id}", get(show_intent))
        .route("/v1/charges", post(create_charge))
        .route("/v1/charges/{id}", get(show_charge))
        .route("/v1/refunds", post(create_refund))
        .route("/v1/refunds/{id}", get(show_refund))
        .route_layer(from_fn_with_state(app.clone(), refuse_while_draining))
        .route_layer(idempotency.with_config(rules.stripe));
    let voids = Router::new()
        .route("/v1/payments/{id}", get(show).delete(void))
        .route_layer(from_fn_with_state(app.clone(), refuse_while_draining))
        .route_layer(idempotency.with_config(rules.optional));
    let open = Router::new()
        .route("/v1/ledger", get(ledger))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics));

    payments
        .merge(stripe)
        .merge(voids)
        .route_layer(from_fn_with_state(rules.flavour, authenticate))
        .merge(open)
        .fallback(async || ApiError::not_found("route"))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(rules.body_limit))
        // A handler with a key is caught by the layer itself; this is for those without one.
        .layer(CatchPanicLayer::custom(|_| ApiError::panicked().into_response()))
        .with_state(app)
}

/// The layer itself refuses keyed requests from then on; this is for those that it lets through.
async fn refuse_while_draining(State(app): State<App>, request: Request, next: Next) -> Response {
    if app.draining.load(Ordering::Relaxed) {
        return ApiError::unavailable("this server is stopping").into_response();
    }
    next.run(request).await
}

async fn healthz() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// Ready if the store does real work, not if it merely accepts a connection.
async fn readyz(State(app): State<App>) -> Response {
    let ready = tokio::time::timeout(READY_WITHIN, app.store.ready()).await;
    let store = app.store.name();
    match ready {
        _ if app.draining.load(Ordering::Relaxed) => not_ready(store, "stopping"),
        Ok(Ok(())) => Json(json!({ "status": "ready", "store": store })).into_response(),
        Ok(Err(error)) => {
            let reason = chain(&error);
            tracing::warn!(reason, "not ready");
            let body = json!({ "status": "unavailable", "store": store, "reason": reason });
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
        Err(_) => not_ready(store, "slow"),
    }
}

fn not_ready(store: &str, status: &str) -> Response {
    let body = json!({ "status": status, "store": store });
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

async fn metrics(State(app): State<App>) -> Response {
    app.engine.refresh_gauges();
    let text = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (text, app.metrics.render()).into_response()
}
