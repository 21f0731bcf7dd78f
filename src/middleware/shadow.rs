//! Shadow mode at the edge: what would be said is counted, and the request runs as if nobody looked.

use std::error::Error as StdError;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tokio::sync::{Notify, oneshot};
use tower_service::Service;
use tracing::Span;

use super::answer::shadowed;
use super::body::ResponseBody;
use super::keys;
use super::service::{Asked, fingerprints, gather, refused};
use crate::config::{Config, MissingKey, Recovery};
use crate::engine::{Call, Engine, Settle, observe};
use crate::error::RejectionKind;
use crate::record::Verdict;
use crate::scope::StorageKey;

/// Whether a body can be looked at and still be handed on whole: its length is known and allowed.
pub(super) fn is_readable(body: &impl Body, config: &Config) -> bool {
    match body.size_hint().exact() {
        Some(length) if length > config.request_limit as u64 => {
            let limit = config.request_limit;
            observe::shadowed(&RejectionKind::RequestTooLarge { limit });
            false
        }
        Some(_) => true,
        None => {
            observe::shadow_unjudged();
            false
        }
    }
}

/// Runs a request untouched, and has its record kept and judged beside it.
pub(super) async fn follow<S, ReqBody, ResBody>(
    engine: Engine,
    config: Arc<Config>,
    asked: Asked,
    mut ready: S,
    parts: Parts,
    body: ReqBody,
) -> Result<Response<ResponseBody<ResBody>>, S::Error>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ReqBody: Body + From<Bytes>,
    ReqBody::Error: Into<Box<dyn StdError + Send + Sync>>,
    ResBody: Body,
{
    // As long as the client takes: nothing but its leaving ends this.
    let Ok(body) = gather(body).await else {
        let kind = RejectionKind::RequestIncomplete;
        return Ok(refused(kind, None, None, &config));
    };
    let outcome = Outcome(judge(&engine, &config, asked, &parts, &body));
    match ready.call(Request::from_parts(parts, ReqBody::from(body))).await {
        Ok(response) => {
            let (mut head, body) = response.into_parts();
            outcome.is(shadowed(&mut head));
            Ok(Response::from_parts(head, ResponseBody::passed(body)))
        }
        Err(error) => {
            outcome.is(Settle::Release(Verdict::Unknown));
            Err(error)
        }
    }
}

/// Has the engine judge a request; gives the way to tell it what came of the handler.
fn judge(
    engine: &Engine,
    config: &Config,
    asked: Asked,
    parts: &Parts,
    body: &Bytes,
) -> Option<oneshot::Sender<Settle>> {
    let Asked { key, caller } = asked;
    let fingerprints = fingerprints(config, parts, body);
    let key = match keys::of_request(key, config, parts, body, &fingerprints) {
        Ok(Some(key)) => key,
        Ok(None) => {
            if config.missing_key == MissingKey::Reject {
                observe::shadowed(&RejectionKind::KeyMissing);
            }
            return None;
        }
        Err(error) => {
            observe::shadowed(&RejectionKind::KeyInvalid(error));
            return None;
        }
    };
    let Some((identity, caller)) = caller else {
        observe::shadowed(&RejectionKind::ScopeMissing);
        return None;
    };
    let mut policy = Arc::clone(&config.policy);
    if matches!(policy.recovery, Recovery::Reconcile(_)) {
        // A hook may act, fence for example, and nothing was interrupted.
        Arc::make_mut(&mut policy).recovery = Recovery::AtMostOnce;
    }
    let call = Call {
        storage_key: StorageKey::in_shadow(&identity, &key),
        caller: caller.in_shadow(),
        key,
        fingerprints,
        policy,
        identity,
        span: Span::current(),
        departure: Notify::new(),
    };
    let (tell, told) = oneshot::channel();
    engine.watch(call, told);
    Some(tell)
}

/// Tells what came of the handler, also if it panics.
struct Outcome(Option<oneshot::Sender<Settle>>);

impl Outcome {
    fn is(mut self, settle: Settle) {
        if let Some(tell) = self.0.take() {
            // Nobody listens if the request would not have run.
            let _ = tell.send(settle);
        }
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if let Some(tell) = self.0.take().filter(|_| std::thread::panicking()) {
            let _ = tell.send(Settle::Release(Verdict::Unknown));
        }
    }
}
