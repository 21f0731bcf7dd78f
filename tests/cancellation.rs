//! Every await of the pipeline as a gate, and the product of all gates: a body, a claim, a renewal, a
//! handler and a completion that each may work, fail, lose a reply, be slow or never end, while the
//! client leaves at each moment. Whatever the combination, the promises hold.
//!
//! Time is tokio's paused clock, so thousands of combinations take seconds.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome,
};
use tower_idempotency::store::StoreFuture;
use tower_idempotency::{
    Config, IdempotencyLayer, Lease, MemoryStore, Recovery, Scope, StorageKey, Store, StoreError,
    StoreErrorKind,
};

/// How an await of the pipeline behaves until the faults are healed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Gate {
    Works,
    /// It is not done, and says so.
    Fails,
    /// It is done, and the reply is lost.
    LosesReply,
    /// It takes a while, within all bounds.
    Slow,
    Never,
}
use Gate::{Fails, LosesReply, Never, Slow, Works};

const SLOW: Duration = Duration::from_millis(300);
const LEASE: Duration = Duration::from_secs(30);

/// [`Recovery`], as far as these scenarios go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    AtMostOnce,
    AtLeastOnce,
}

#[derive(Clone, Copy, Debug)]
struct Scenario {
    recovery: Mode,
    body: Gate,
    claim: Gate,
    renew: Gate,
    handler: Gate,
    settle: Gate,
    /// When the client leaves, if it does.
    leaves: Option<Duration>,
}

/// A memory store behind gates.
#[derive(Debug)]
struct Gated {
    store: MemoryStore,
    scenario: Scenario,
    healed: Arc<AtomicBool>,
}

impl Gated {
    fn pass<'a, T: Send + 'a>(
        &'a self,
        gate: Gate,
        verb: &'static str,
        call: StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        let gate = if self.healed.load(Ordering::SeqCst) { Works } else { gate };
        let error = move |kind| StoreError::new(kind, "gated", verb);
        Box::pin(async move {
            match gate {
                Works => call.await,
                Fails => Err(error(StoreErrorKind::Unavailable)),
                LosesReply => {
                    call.await?;
                    Err(error(StoreErrorKind::OutcomeUnknown))
                }
                Slow => {
                    sleep(SLOW).await;
                    call.await
                }
                Never => std::future::pending().await,
            }
        })
    }
}

impl Store for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }
    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        // The memory store acts when it is called, so it is called when the gate has opened.
        let call = Box::pin(async move { self.store.claim(key, claim).await });
        self.pass(self.scenario.claim, "claim", call)
    }
    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        let call = Box::pin(async move { self.store.renew(lease, renewal).await });
        self.pass(self.scenario.renew, "renew", call)
    }
    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        let call = Box::pin(async move { self.store.complete(lease, completion).await });
        self.pass(self.scenario.settle, "complete", call)
    }
    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        let call = Box::pin(async move { self.store.release(lease, release).await });
        self.pass(self.scenario.settle, "release", call)
    }
    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        self.store.resolve(key, resolution)
    }
    fn ready(&self) -> StoreFuture<'_, ()> {
        self.store.ready()
    }
}

/// A request body behind a gate: one frame, then the gate, then another.
struct GatedBody {
    gate: Gate,
    sent: usize,
    slow: Pin<Box<tokio::time::Sleep>>,
}

impl http_body::Body for GatedBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if self.sent == 1 {
            match self.gate {
                Works => {}
                Fails | LosesReply => {
                    return Poll::Ready(Some(Err(std::io::Error::other("cut"))));
                }
                Slow => std::task::ready!(self.slow.as_mut().poll(cx)),
                Never => return Poll::Pending,
            }
        }
        self.sent += 1;
        Poll::Ready(match self.sent {
            1 | 2 => Some(Ok(Frame::data(Bytes::from_static(b"half")))),
            _ => None,
        })
    }
}

#[derive(Debug)]
struct Answered {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

async fn ask(app: Router, body: Body) -> Answered {
    let request = Request::post("/").header("idempotency-key", "k").body(body).unwrap();
    let response = app.oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.into()).unwrap();
    Answered { status: head.status, headers: head.headers, body }
}

/// Runs one scenario and checks the promises; answers how it ended, for the reached-counters.
async fn check(scenario: Scenario) -> Vec<&'static str> {
    let healed = Arc::new(AtomicBool::new(false));
    let store = Gated { store: MemoryStore::new(), scenario, healed: Arc::clone(&healed) };
    let recovery = match scenario.recovery {
        Mode::AtMostOnce => Recovery::AtMostOnce,
        Mode::AtLeastOnce => Recovery::AtLeastOnce,
    };
    let config = Config::builder().scope(Scope::global()).lease(LEASE).recovery(recovery);
    let layer = IdempotencyLayer::new(config.build().unwrap(), store);
    // Started and finished runs: the ledger. The handler's effect is its start.
    let started = Arc::new(AtomicUsize::new(0));
    let told = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let started = Arc::clone(&started);
        move || async move {
            let run = started.fetch_add(1, Ordering::SeqCst) + 1;
            // Only the first run meets the gate; a run after a crash is a healthy one.
            match if run == 1 { scenario.handler } else { Works } {
                Works => {}
                Fails | LosesReply => panic!("the handler panics after its effect"),
                Slow => sleep(LEASE * 3).await,
                Never => std::future::pending().await,
            }
            (StatusCode::CREATED, format!("run {run}"))
        }
    };
    let app = Router::new().route("/", post(handler)).layer(layer.clone());

    // The faulty phase: one request, whose client may leave.
    let body = Body::new(GatedBody { gate: scenario.body, sent: 0, slow: Box::pin(sleep(SLOW)) });
    let began = Instant::now();
    let patience = scenario.leaves.unwrap_or(LEASE * 20);
    let first = timeout(patience, ask(app.clone(), body)).await.ok();
    let mut seen = Vec::new();
    if let Some(first) = first {
        told.lock().unwrap().push((first.status, first.body.clone()));
        seen.push(match first.status.as_u16() {
            201 if first.headers.contains_key("idempotency-status") => "not stored",
            201 => "created",
            408 => "incomplete",
            409 => "conflict",
            500 => "panicked",
            503 => "unavailable",
            other => panic!("{scenario:?}: answered {other}: {}", first.body),
        });
        let handler_time = if scenario.handler == Slow { LEASE * 3 } else { Duration::ZERO };
        let bound = Duration::from_secs(30 + 10) + handler_time;
        assert!(began.elapsed() <= bound, "{scenario:?}: took {:?}", began.elapsed());
    } else {
        seen.push("left");
        assert!(
            scenario.leaves.is_some() || scenario.handler == Never,
            "{scenario:?}: nobody was answered"
        );
    }

    // All faults are healed, and whatever goes on in the background has time to end.
    healed.store(true, Ordering::SeqCst);
    sleep(LEASE * 10).await;
    let runs = started.load(Ordering::SeqCst);
    assert!(runs <= 1, "{scenario:?}: {runs} runs of one request");

    // The client asks again until it has a final answer.
    let mut last = None;
    for _ in 0..20 {
        let Ok(answer) = timeout(LEASE * 20, ask(app.clone(), Body::from("halfhalf"))).await else {
            // This very request met the handler that never ends.
            assert_eq!(scenario.handler, Never, "{scenario:?}: no answer");
            last = None;
            break;
        };
        let retry = answer.headers.contains_key("retry-after");
        last = Some(answer);
        if !retry {
            break;
        }
        sleep(LEASE).await;
    }
    let runs = started.load(Ordering::SeqCst);
    let at_most_once = scenario.recovery == Mode::AtMostOnce;
    if at_most_once {
        assert!(runs <= 1, "{scenario:?}: {runs} runs");
    }
    let Some(last) = last else {
        seen.push("final in use");
        return seen;
    };
    match last.status.as_u16() {
        500 => {
            seen.push("final panicked");
            assert_eq!((scenario.handler, runs), (Fails, 1), "{scenario:?}");
        }
        201 => {
            seen.push("final created");
            assert_eq!(last.body, format!("run {runs}"), "{scenario:?}");
            for (status, body) in told.lock().unwrap().iter() {
                assert!(
                    *status != StatusCode::CREATED || *body == last.body,
                    "{scenario:?}: told {body:?}, then {:?}",
                    last.body
                );
            }
        }
        409 if last.body.contains("idempotency_outcome_unknown") => {
            seen.push("final unknown");
            assert!(at_most_once, "{scenario:?}: unknown although it may run again");
        }
        409 if last.body.contains("idempotency_key_in_use") => {
            seen.push("final in use");
            assert_eq!(scenario.handler, Never, "{scenario:?}: stuck");
        }
        other => panic!("{scenario:?}: ends with {other}: {}", last.body),
    }
    // Where nothing went wrong after the handler began, its answer is what retries get.
    let healthy = matches!(scenario.handler, Works | Slow) && runs == 1;
    if healthy && at_most_once {
        assert_eq!(last.status, StatusCode::CREATED, "{scenario:?}: {}", last.body);
    }

    let drained = layer.drain(Duration::from_secs(60)).await;
    assert_eq!(
        drained.unfinished,
        usize::from(scenario.handler == Never && runs > 0),
        "{scenario:?}"
    );
    seen
}

fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    let leaves = [None, Some(0), Some(1), Some(150), Some(450), Some(3000), Some(70_000)];
    for recovery in [Mode::AtMostOnce, Mode::AtLeastOnce] {
        for body in [Works, Fails, Slow, Never] {
            for claim in [Works, Fails, LosesReply, Slow, Never] {
                for renew in [Works, Fails, LosesReply, Never] {
                    for handler in [Works, Fails, Slow, Never] {
                        for settle in [Works, Fails, LosesReply, Slow, Never] {
                            for leaves in leaves {
                                let leaves = leaves.map(Duration::from_millis);
                                all.push(Scenario {
                                    recovery,
                                    body,
                                    claim,
                                    renew,
                                    handler,
                                    settle,
                                    leaves,
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    // A body that never comes makes all that follows equal.
    all.retain(|s| !matches!(s.body, Fails | Never) || (s.renew == Works && s.settle == Works));
    // Renewals happen only while a slow handler runs.
    all.retain(|s| matches!(s.handler, Slow | Never) || s.renew == Works);
    all
}

#[test]
fn the_promises_hold_whatever_fails_and_whenever_the_client_leaves() {
    // Panics of handlers are part of the matrix; their messages would bury a failure.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let expected =
            info.payload().downcast_ref::<&str>().is_some_and(|m| m.starts_with("the handler"));
        if !expected {
            hook(info);
        }
    }));
    let all = scenarios();
    let mut reached = std::collections::BTreeMap::new();
    for scenario in &all {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        for end in runtime.block_on(check(*scenario)) {
            *reached.entry(end).or_insert(0) += 1;
        }
    }
    println!("{} scenarios: {reached:?}", all.len());
    for end in [
        "created",
        "not stored",
        "incomplete",
        "panicked",
        "unavailable",
        "left",
        "final created",
        "final unknown",
        "final in use",
    ] {
        assert!(reached.contains_key(end), "no scenario ended with {end:?}: {reached:?}");
    }
}
