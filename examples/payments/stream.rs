//! `tok_stream`: an answer that takes its time, so the layer passes it on and keeps no copy.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use serde_json::json;

use crate::ledger::Payment;

const EVENTS: u32 = 5;
const EVERY: Duration = Duration::from_millis(200);

/// Five events, one each 200 ms.
pub(crate) fn events(payment: Payment) -> Response {
    let events = stream::unfold((1, payment), |(step, payment)| async move {
        if step > EVENTS {
            return None;
        }
        tokio::time::sleep(EVERY).await;
        let data = json!({ "step": step, "of": EVENTS, "payment": payment });
        let event = Bytes::from(format!("event: progress\ndata: {data}\n\n"));
        Some((Ok::<_, std::convert::Infallible>(event), (step + 1, payment)))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}
