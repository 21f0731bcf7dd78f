//! The service: what is covered, the key, the scope, the body, the fingerprint; then the engine.

use std::error::Error as StdError;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::{FutureExt as _, poll};
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::sync::Notify;
use tokio::time::timeout;
use tower_service::Service;
use tracing::Span;

use super::answer::{Answer, judge, referenced, refusal};
use super::body::ResponseBody;
use super::extension::Replayed;
use super::future::ResponseFuture;
use super::{keys, shadow};
use crate::config::{
    Config, Enforcement, IDEMPOTENCY_KEY, IDEMPOTENCY_STATUS, IDEMPOTENT_REPLAYED, KeySource,
    MissingKey,
};
use crate::engine::{Call, Conclusion, Engine, Execution, Ran, Run, Seen, Settle, observe};
use crate::error::{Rejection, RejectionKind};
use crate::fingerprint::Fingerprints;
use crate::guard::{ReplayDecision, ReplayGuard, ReplayRequest};
use crate::key::IdempotencyKey;
use crate::record::Verdict;
use crate::response::{StoredBody, StoredResponse};
use crate::scope::{CallerId, Identity, StorageKey};

const FORBIDDEN: RejectionKind = RejectionKind::ReplayForbidden;
/// How long a replay guard may think: as long as an answer may take to be stored, and some.
const GUARD_WITHIN: Duration = Duration::from_secs(5);

/// A service whose covered requests run at most once per key. Made by
/// [`IdempotencyLayer`](super::IdempotencyLayer).
#[derive(Clone, Debug)]
pub struct Idempotency<S> {
    inner: S,
    engine: Engine,
    config: Arc<Config>,
}

impl<S> Idempotency<S> {
    pub(super) fn new(inner: S, engine: Engine, config: Arc<Config>) -> Self {
        Self { inner, engine, config }
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for Idempotency<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    ReqBody: Body + From<Bytes> + Send + 'static,
    ReqBody::Data: Send,
    ReqBody::Error: Into<Box<dyn StdError + Send + Sync>>,
    ResBody: Body + Send + 'static,
    ResBody::Data: Send,
    ResBody::Error: Send,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, ResBody, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let covered = self.config.methods.contains(request.method())
            // Within another layer of ours: that one has the key already.
            && request.extensions().get::<Execution>().is_none();
        if !covered {
            return ResponseFuture::passed_through(self.inner.call(request));
        }
        if self.config.policy.enforcement == Enforcement::Shadow {
            return self.watch(request);
        }
        let key = keys::in_headers(request.headers(), &self.config);
        let elsewhere = self.config.key_source != KeySource::Headers;
        let optional = self.config.missing_key == MissingKey::PassThrough;
        if key == Ok(None) && optional && !elsewhere {
            observe::passed_through();
            return ResponseFuture::passed_through(self.inner.call(request));
        }
        // The instance that was polled ready is the one that is called, or dropped with whatever
        // it has reserved; its clone stays behind.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let key = match key {
            Ok(None) if !elsewhere => return self.refuse(RejectionKind::KeyMissing, None),
            Ok(key) => key,
            Err(error) => return self.refuse(RejectionKind::KeyInvalid(error), None),
        };
        let (parts, body) = request.into_parts();
        let caller = self.config.scope.identify(&parts, whole_path);
        // Where a key is optional and may be in the body, nobody knows yet whether one is needed.
        if caller.is_none() && (key.is_some() || !optional) {
            return self.refuse(RejectionKind::ScopeMissing, key.as_ref());
        }
        let asked = Asked { key, caller };
        let (engine, config) = (self.engine.clone(), Arc::clone(&self.config));
        ResponseFuture::covered(cover(engine, config, asked, ready, parts, body))
    }
}

impl<S> Idempotency<S> {
    /// Lets a request run as if the layer were not there, and counts what it would have done.
    fn watch<ReqBody, ResBody>(
        &mut self,
        request: Request<ReqBody>,
    ) -> ResponseFuture<S::Future, ResBody, S::Error>
    where
        S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
        S::Future: Send,
        S::Error: Send + 'static,
        ReqBody: Body + From<Bytes> + Send + 'static,
        ReqBody::Data: Send,
        ReqBody::Error: Into<Box<dyn StdError + Send + Sync>>,
        ResBody: Body + Send + 'static,
        ResBody::Data: Send,
        ResBody::Error: Send,
    {
        let key = keys::in_headers(request.headers(), &self.config);
        let refusal = match &key {
            Ok(None) if self.config.key_source == KeySource::Headers => {
                let required = self.config.missing_key == MissingKey::Reject;
                Some(required.then_some(RejectionKind::KeyMissing))
            }
            Ok(_) => None,
            Err(error) => Some(Some(RejectionKind::KeyInvalid(*error))),
        };
        if let Some(refusal) = &refusal {
            refusal.iter().for_each(observe::shadowed);
        }
        let (Ok(key), None) = (key, refusal) else {
            return ResponseFuture::passed_through(self.inner.call(request));
        };
        if !shadow::is_readable(request.body(), &self.config) {
            return ResponseFuture::passed_through(self.inner.call(request));
        }
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let (parts, body) = request.into_parts();
        let caller = self.config.scope.identify(&parts, whole_path);
        let asked = Asked { key, caller };
        let (engine, config) = (self.engine.clone(), Arc::clone(&self.config));
        ResponseFuture::covered(shadow::follow(engine, config, asked, ready, parts, body))
    }

    fn refuse<F, B, E>(
        &self,
        kind: RejectionKind,
        key: Option<&IdempotencyKey>,
    ) -> ResponseFuture<F, B, E> {
        ResponseFuture::answered(refused(kind, None, key, &self.config))
    }
}

/// Who asks for what, as far as the head of the request tells.
pub(super) struct Asked {
    pub(super) key: Option<IdempotencyKey>,
    pub(super) caller: Option<(Identity, CallerId)>,
}

/// The path as the client sent it: inside a nested router only `OriginalUri` knows the whole.
fn whole_path(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return original.path();
    }
    parts.uri.path()
}

/// Takes a covered request from its body to its answer.
///
/// The body is read here, in the connection's future: a client that leaves meanwhile leaves no
/// trace. All that follows runs in a task of the engine.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn keeps all it is given twice, and every request has this"
)]
fn cover<S, ReqBody, ResBody>(
    engine: Engine,
    config: Arc<Config>,
    asked: Asked,
    ready: S,
    parts: Parts,
    body: ReqBody,
) -> impl Future<Output = Result<Response<ResponseBody<ResBody>>, S::Error>>
+ Send
+ use<S, ReqBody, ResBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    ReqBody: Body + From<Bytes> + Send + 'static,
    ReqBody::Data: Send,
    ReqBody::Error: Into<Box<dyn StdError + Send + Sync>>,
    ResBody: Body + Send + 'static,
    ResBody::Data: Send,
    ResBody::Error: Send,
{
    async move {
        let body = match read_body(body, &config).await {
            Ok(body) => body,
            Err(kind) => {
                let (key, caller) = (asked.key.as_ref(), asked.caller.as_ref());
                let id = key.zip(caller).map(|(key, (identity, _))| StorageKey::new(identity, key));
                return Ok(refused(kind, id, key, &config));
            }
        };
        let (key, storage_key, asker, conclusion) =
            match open(&engine, &config, asked, ready, parts, body) {
                Opened::Executes { key, storage_key, asker, conclusion } => {
                    (key, storage_key, asker, conclusion)
                }
                Opened::PassesThrough(response) => {
                    return Ok(response.await?.map(ResponseBody::passed));
                }
                Opened::Refused { kind, key } => {
                    return Ok(refused(kind, None, key.as_ref(), &config));
                }
            };
        let mut response = match conclusion.await {
            Conclusion::Ran(answer, Seen::RolledBack) => answer.into_undone(&config)?,
            Conclusion::Ran(answer, _) => answer.into_response(&config, storage_key)?,
            Conclusion::NotStored(answer) => with_status(
                answer.into_response(&config, storage_key)?,
                HeaderValue::from_static("not-stored"),
            ),
            Conclusion::Unprotected(answer) => with_status(
                answer.into_response(&config, storage_key)?,
                HeaderValue::from_static("unprotected"),
            ),
            Conclusion::Replay(stored) => match allowed(asker, &key, stored.status()).await {
                ReplayDecision::Allow => replay(*stored, &config),
                ReplayDecision::Refuse => refused(FORBIDDEN, Some(storage_key), None, &config),
            },
            Conclusion::Reconciled(stored) => match allowed(asker, &key, stored.status()).await {
                ReplayDecision::Allow => first(*stored, &config),
                ReplayDecision::Refuse => refused(FORBIDDEN, Some(storage_key), None, &config),
            },
            Conclusion::Refused(rejection) => referenced(rejection, storage_key, &config),
        };
        echo(&mut response, Some(&key));
        Ok(response)
    }
}

/// A request whose body is read.
enum Opened<E, F> {
    Executes {
        key: IdempotencyKey,
        storage_key: StorageKey,
        /// Only a guard wants to know again who asked.
        asker: Option<Box<(ReplayGuard, Parts)>>,
        conclusion: E,
    },
    PassesThrough(Pin<Box<F>>),
    Refused {
        kind: RejectionKind,
        key: Option<IdempotencyKey>,
    },
}

/// Begins to execute a request that is read. Nothing of what that takes is left in the future of its connection.
fn open<S, ReqBody, ResBody>(
    engine: &Engine,
    config: &Arc<Config>,
    asked: Asked,
    mut ready: S,
    parts: Parts,
    body: Bytes,
) -> Opened<
    impl Future<Output = Conclusion<Answer<ResBody, S::Error>>> + Send + use<S, ReqBody, ResBody>,
    S::Future,
>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    ReqBody: Body + From<Bytes> + Send + 'static,
    ResBody: Body + Send + 'static,
    ResBody::Data: Send,
    ResBody::Error: Send,
{
    let fingerprints = fingerprints(config, &parts, &body);
    let key = match keys::of_request(asked.key, config, &parts, &body, &fingerprints) {
        Ok(Some(key)) => key,
        Ok(None) if config.missing_key == MissingKey::PassThrough => {
            observe::passed_through();
            let request = Request::from_parts(parts, ReqBody::from(body));
            return Opened::PassesThrough(Box::pin(ready.call(request)));
        }
        Ok(None) => return Opened::Refused { kind: RejectionKind::KeyMissing, key: None },
        Err(error) => {
            return Opened::Refused { kind: RejectionKind::KeyInvalid(error), key: None };
        }
    };
    let Some((identity, caller)) = asked.caller else {
        return Opened::Refused { kind: RejectionKind::ScopeMissing, key: Some(key) };
    };
    let storage_key = StorageKey::new(&identity, &key);
    let call = Arc::new(Call {
        key: key.clone(),
        storage_key,
        caller,
        identity,
        fingerprints,
        policy: Arc::clone(&config.policy),
        span: Span::current(),
        departure: Notify::new(),
    });
    let asker = config.replay_guard.as_ref().map(|guard| Box::new((guard.clone(), parts.clone())));
    let mut handler = Handler { input: Some((ready, parts)), body, config: Arc::clone(config) };
    let conclusion = engine.execute(call, move |run| handler.start(run));
    Opened::Executes { key, storage_key, asker, conclusion }
}

/// Reads a request body, at most as much and for as long as the configuration says.
async fn read_body<B>(body: B, config: &Config) -> Result<Bytes, RejectionKind>
where
    B: Body,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let limit = config.request_limit;
    let too_large = RejectionKind::RequestTooLarge { limit };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large);
    }
    let mut gathered = pin!(gather(Limited::new(body, limit)));
    // Most bodies have come with their head: no clock is needed for them.
    let gathered = match poll!(gathered.as_mut()) {
        Poll::Ready(gathered) => Ok(gathered),
        Poll::Pending => timeout(config.request_timeout, gathered).await,
    };
    match gathered {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if is_length_limit(&*error) => Err(too_large),
        Ok(Err(_)) | Err(_) => Err(RejectionKind::RequestIncomplete),
    }
}

/// The data of a body. A single frame is taken as it is; more are copied together as they come: a
/// client chooses their size, and a frame of one byte holds fifty times as much memory.
pub(super) async fn gather<B: Body>(body: B) -> Result<Bytes, B::Error> {
    let mut body = pin!(body);
    let (mut single, mut several) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = body.frame().await {
        let Ok(mut data) = frame?.into_data() else { continue };
        if single.is_empty() && several.is_empty() {
            single = data.copy_to_bytes(data.remaining());
            continue;
        }
        several.extend_from_slice(&std::mem::take(&mut single));
        several.put(data);
    }
    Ok(if several.is_empty() { single } else { several.freeze() })
}

/// True for our own limit and for one that a layer outside put around the body.
fn is_length_limit(error: &(dyn StdError + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

pub(super) fn fingerprints(config: &Config, parts: &Parts, body: &Bytes) -> Fingerprints {
    let path = whole_path(parts);
    let mut all = config.recipes.iter().map(|recipe| recipe.fingerprint(parts, path, body));
    let current = all.next().expect("a configuration has at least one recipe");
    let mut fingerprints = Fingerprints::one(current);
    for older in all {
        let fits = fingerprints.push(older);
        debug_assert!(fits, "a configuration has at most as many recipes as fit");
    }
    fingerprints
}

/// The handler with its input, startable again where the store may roll everything back.
struct Handler<S> {
    input: Option<(S, Parts)>,
    body: Bytes,
    config: Arc<Config>,
}

impl<S> Handler<S> {
    fn start<ReqBody, ResBody>(
        &mut self,
        run: Run,
    ) -> impl Future<Output = Ran<Answer<ResBody, S::Error>>> + Send + use<S, ReqBody, ResBody>
    where
        S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone + Send + 'static,
        S::Future: Send,
        S::Error: Send,
        ReqBody: From<Bytes> + Send,
        ResBody: Body + Send,
        ResBody::Data: Send,
        ResBody::Error: Send,
    {
        let Run { execution, attachments, may_repeat } = run;
        // A second start finds no instance that is ready, so it makes one ready.
        let (mut service, mut parts) = self
            .input
            .take()
            .expect("input is kept for as long as the engine may start the handler again");
        if may_repeat {
            self.input = Some((service.clone(), parts.clone()));
        }
        let (body, config) = (self.body.clone(), Arc::clone(&self.config));
        async move {
            parts.extensions.insert(execution);
            parts.extensions.extend(attachments);
            if let Err(error) = poll_fn(|cx| service.poll_ready(cx)).await {
                return Ran {
                    settle: Settle::Release(Verdict::NoEffect),
                    reply: Answer::Error(error),
                };
            }
            match service.call(Request::from_parts(parts, ReqBody::from(body))).await {
                Ok(response) => judge(response, &config).await,
                // The inner service failed without an answer: a timeout, a dropped connection.
                Err(error) => {
                    Ran { settle: Settle::Release(Verdict::Unknown), reply: Answer::Error(error) }
                }
            }
        }
    }
}

/// Asks the guard, if there is one. Who gets no answer in time does not get the stored one either.
async fn allowed(
    asker: Option<Box<(ReplayGuard, Parts)>>,
    key: &IdempotencyKey,
    status: StatusCode,
) -> ReplayDecision {
    match asker {
        None => ReplayDecision::Allow,
        // What is rare must not make the future of every request larger.
        Some(asker) => Box::pin(decide(*asker, key, status)).await,
    }
}

async fn decide(
    (guard, head): (ReplayGuard, Parts),
    key: &IdempotencyKey,
    status: StatusCode,
) -> ReplayDecision {
    let request = ReplayRequest::new(head, key.clone(), status);
    let asked = AssertUnwindSafe(async move { guard.ask(request).await }).catch_unwind();
    match timeout(GUARD_WITHIN, asked).await {
        Ok(Ok(decision)) => decision,
        Ok(Err(_)) => {
            tracing::error!("the replay guard panicked");
            ReplayDecision::Refuse
        }
        Err(_) => {
            tracing::error!(bound = ?GUARD_WITHIN, "the replay guard did not answer in time");
            ReplayDecision::Refuse
        }
    }
}

/// The original answer again.
fn replay<B>(stored: StoredResponse, config: &Config) -> Response<ResponseBody<B>> {
    let is_kept = matches!(stored.body(), StoredBody::Kept(_));
    let mut response = first(stored, config);
    if is_kept {
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
        response.extensions_mut().insert(Replayed);
    }
    response
}

/// A stored answer that nobody was given before.
fn first<B>(stored: StoredResponse, config: &Config) -> Response<ResponseBody<B>> {
    let (status, headers, body) = stored.into_parts();
    match body {
        StoredBody::Kept(body) => {
            let mut response = Response::new(ResponseBody::full(body));
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            response
        }
        StoredBody::NotKept => {
            let location = headers.get(http::header::LOCATION).cloned();
            let kind = RejectionKind::ResultUnavailable { status, location };
            refusal(Rejection::new(kind), config)
        }
    }
}

/// A refusal before anything was claimed, counted.
pub(super) fn refused<B>(
    kind: RejectionKind,
    id: Option<StorageKey>,
    key: Option<&IdempotencyKey>,
    config: &Config,
) -> Response<ResponseBody<B>> {
    observe::refused(&kind, id);
    let mut response = refusal(Rejection::new(kind), config);
    echo(&mut response, key);
    response
}

fn with_status<B>(mut response: Response<B>, status: HeaderValue) -> Response<B> {
    response.headers_mut().insert(IDEMPOTENCY_STATUS, status);
    response
}

/// Every answer to a request with a key says which key it was (as at Stripe, whose SDKs read it).
fn echo<B>(response: &mut Response<B>, key: Option<&IdempotencyKey>) {
    if let Some(key) = key {
        response.headers_mut().insert(IDEMPOTENCY_KEY, key.to_header_value());
    }
}
