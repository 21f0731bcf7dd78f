//! Requests whose futures are dropped where little is left to hand them to, and requests whose futures are kept
//! and not polled: what others feel of them. And twins that wait when their process has to stop.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::{Fault, Faulty, Verb};
use tower_idempotency::{
    Config, ConfigBuilder, Engine, Found, IdempotencyLayer, MemoryStore, Recovery, Scope,
    SqliteStore, Store, StoreDown, StoreErrorKind,
};

type Pending = Pin<Box<dyn Future<Output = u16> + Send>>;

fn layer(config: ConfigBuilder, store: impl Store) -> IdempotencyLayer {
    IdempotencyLayer::on(Engine::new(store), config.scope(Scope::global()).build().unwrap())
}

/// One request; what it comes to is its status.
fn ask<H, F>(layer: &IdempotencyLayer, key: &str, handler: H) -> Pending
where
    H: Fn() -> F + Clone + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let service = layer.layer(service_fn(move |_: Request<Full<Bytes>>| {
        let ran = handler();
        async move {
            ran.await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
        }
    }));
    let request = Request::post("/pay").header("idempotency-key", key);
    let request = request.body(Full::from(Bytes::from_static(b"order"))).unwrap();
    Box::pin(async move { service.oneshot(request).await.unwrap().status().as_u16() })
}

/// A handler that says that it has begun, and never ends.
fn endless(
    begun: &Arc<Semaphore>,
) -> impl Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Clone + Send + use<> {
    let begun = Arc::clone(begun);
    move || {
        begun.add_permits(1);
        Box::pin(std::future::pending())
    }
}

async fn wait_for(begun: &Semaphore, times: u32) {
    begun.acquire_many(times).await.unwrap().forget();
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

const INSIDE: &str = "LEFT_BEHIND_INSIDE";

/// Runs a test of this file in a process of its own, or says that this is that process.
fn outside(name: &str) -> Option<Output> {
    if std::env::var_os(INSIDE).is_some() {
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env(INSIDE, "1").env("RUST_BACKTRACE", "0");
    Some(child.output().unwrap())
}

#[track_caller]
fn ended_without_a_panic(output: &Output) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !told.contains("panicked"), "{}: {told}", output.status);
}

#[test]
fn a_runtime_that_ends_under_a_handler_with_two_requests_of_its_own_panics_nowhere() {
    let name = "a_runtime_that_ends_under_a_handler_with_two_requests_of_its_own_panics_nowhere";
    if let Some(output) = outside(name) {
        return ended_without_a_panic(&output);
    }
    let begun = Arc::new(Semaphore::new(0));
    let outer = layer(Config::builder(), MemoryStore::new());
    let inner = layer(Config::builder(), MemoryStore::new());
    let runtime = current_thread();
    let handler = endless(&begun);
    let request = ask(&outer, "outer", move || {
        let (one, other) =
            (ask(&inner, "one", handler.clone()), ask(&inner, "other", handler.clone()));
        async move {
            let _ = tokio::join!(one, other);
        }
    });
    runtime.spawn(request);
    runtime.block_on(wait_for(&begun, 2));
    drop(runtime);
}

/// A connection with a transaction open on it goes back to its pool by a task. In a runtime that ends, a task is dropped as
/// soon as it is spawned, and everything that it was given with it: one that was given what spawns it would
/// be spawned again and again, until the stack is full and the process aborts.
#[test]
fn a_runtime_that_ends_while_a_database_is_asked_for_a_claim_panics_nowhere() {
    let name = "a_runtime_that_ends_while_a_database_is_asked_for_a_claim_panics_nowhere";
    if let Some(output) = outside(name) {
        return ended_without_a_panic(&output);
    }
    let begun = Arc::new(Semaphore::new(0));
    let folder = tempfile::tempdir().unwrap();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
        store.migrate().await.unwrap();
        let layer = layer(Config::builder(), store.clone());
        tokio::spawn(ask(&layer, "first", endless(&begun)));
        wait_for(&begun, 1).await;
        // The first one writes, so this one's claim waits.
        tokio::spawn(ask(&layer, "second", endless(&begun)));
        let waits = async {
            while !format!("{store:?}").contains("waiting: 1") {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(10), waits).await.unwrap();
    });
    drop(runtime);
}

thread_local! {
    static KEPT: RefCell<Option<Pending>> = const { RefCell::new(None) };
}

#[test]
fn a_thread_that_ends_with_a_request_in_a_thread_local_does_not_end_the_process() {
    let name = "a_thread_that_ends_with_a_request_in_a_thread_local_does_not_end_the_process";
    if let Some(output) = outside(name) {
        return ended_without_a_panic(&output);
    }
    let begun = Arc::new(Semaphore::new(0));
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let layer = layer(Config::builder(), MemoryStore::new());
    let mut request = ask(&layer, "key", endless(&begun));
    let handle = runtime.handle().clone();
    let thread = std::thread::spawn(move || {
        // The first thing of its kind here, so the last one that is cleared away.
        KEPT.with(|_| ());
        let a_while = Duration::from_millis(10);
        handle.block_on(async { timeout(a_while, &mut request).await }).unwrap_err();
        KEPT.set(Some(request));
    });
    thread.join().unwrap();
}

#[tokio::test]
async fn a_question_whose_asker_is_not_polled_any_more_holds_up_nobody_else_without_a_bound() {
    let asked = Arc::new(Semaphore::new(0));
    let hook = {
        let asked = Arc::clone(&asked);
        move |_| {
            asked.add_permits(1);
            async {
                sleep(Duration::from_millis(50)).await;
                Found::StillUnknown
            }
        }
    };
    let config = Config::builder()
        .reconcile_within(Duration::from_millis(300))
        .wait(Duration::from_millis(300))
        .recovery(Recovery::reconcile(hook));
    let layer = layer(config, MemoryStore::new());
    let panics = || async { panic!("as it is meant to be") };
    assert_eq!(ask(&layer, "key", panics).await, 500);

    let mut asker = ask(&layer, "key", panics);
    timeout(Duration::from_millis(10), &mut asker).await.unwrap_err();
    wait_for(&asked, 1).await;
    // The server, a stream that is buffered, a loop over connections: somebody keeps it and does not poll it.
    let other = timeout(Duration::from_secs(5), ask(&layer, "key", panics)).await;
    assert_eq!(other.expect("it is answered within its bounds"), 409);
    drop(asker);
}

/// The clock moves when nobody has anything else to do: what is waited for here has happened by then.
#[tokio::test(start_paused = true)]
async fn a_twin_that_waits_at_a_shutdown_starts_no_second_run_beside_the_first_when_the_store_is_down()
 {
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let store = Faulty::new(MemoryStore::new());
    let config = Config::builder().store_down(StoreDown::RunUnprotected);
    let layer = layer(config, store.clone());
    let handler = {
        let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
        move || {
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            async move {
                begun.add_permits(1);
                go.acquire().await.unwrap().forget();
            }
        }
    };
    let run = tokio::spawn(ask(&layer, "key", handler.clone()));
    wait_for(&begun, 1).await;
    let twin = tokio::spawn(ask(&layer, "key", handler));
    sleep(Duration::from_millis(100)).await;
    store.inject_always(Verb::Claim, Fault::Fail(StoreErrorKind::Unavailable));
    let engine = layer.engine().clone();
    let drained = tokio::spawn(async move { engine.drain(Duration::from_secs(10)).await });
    sleep(Duration::from_millis(1000)).await;
    let second = begun.available_permits();
    store.heal();
    go.add_permits(2);
    assert_eq!((run.await.unwrap(), drained.await.unwrap().unfinished), (200, 0));
    assert_eq!(
        (twin.await.unwrap(), second),
        (409, 0),
        "its status, and the runs beside the first"
    );
}
