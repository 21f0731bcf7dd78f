//! The shop: an axum application under the layer, whose handlers write into a ledger.

use std::future::ready;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::request::Parts;
use http::{Method, Response, Uri};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tower::ServiceExt as _;
use tower_idempotency::{
    Config, ConfigBuilder, Engine, IdempotencyLayer, MemoryStore, Scope, Store as _, WaitLimits,
};

use super::{Ask, Seen, WatchedStore};

/// What the handlers did, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    /// Notes one effect; says how many there are now.
    pub(crate) fn note(&self, effect: impl Into<String>) -> usize {
        let mut entries = self.0.lock().unwrap();
        entries.push(effect.into());
        entries.len()
    }

    pub(crate) fn entries(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    #[track_caller]
    pub(crate) fn expect(&self, effects: usize) {
        let entries = self.entries();
        assert_eq!(entries.len(), effects, "effects: {entries:?}");
    }
}

/// Where a handler stops until the test lets it go on.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    entered: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    pub(crate) fn closed() -> Self {
        Self { entered: Arc::new(Semaphore::new(0)), open: Arc::new(Semaphore::new(0)) }
    }

    /// In the handler: says that it is here, and waits.
    pub(crate) async fn pass(&self) {
        self.entered.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// In the test: waits for the next handler that has come to the gate.
    pub(crate) async fn entered(&self) {
        self.entered.acquire().await.unwrap().forget();
    }

    /// Lets one handler through.
    pub(crate) fn open_once(&self) {
        self.open.add_permits(1);
    }

    /// Lets everybody through from now on.
    pub(crate) fn open(&self) {
        self.open.add_permits(1 << 20);
    }
}

pub(crate) type Builder = ConfigBuilder;
type Routes = Arc<dyn Fn(Ledger) -> Router + Send + Sync>;

/// One process of the shop: routes, layer, engine. Several may share a store and a ledger.
#[derive(Clone)]
pub(crate) struct Shop {
    pub(crate) ledger: Ledger,
    pub(crate) store: WatchedStore,
    pub(crate) layer: IdempotencyLayer,
    pub(crate) routes: Routes,
    config: Config,
    app: Router,
}

/// The configuration as it comes.
pub(crate) fn defaults(config: Builder) -> Builder {
    config
}

/// Twins are answered at once.
pub(crate) fn no_wait(config: Builder) -> Builder {
    config.wait(std::time::Duration::ZERO)
}

/// An authentication layer would have done this.
pub(crate) fn account_of(parts: &Parts) -> Option<String> {
    Some(parts.headers.get("account")?.to_str().ok()?.to_owned())
}

impl Shop {
    /// Takes payments on every path: 201, `payment 1`, `payment 2` and so on.
    pub(crate) fn open() -> Self {
        Self::with(defaults)
    }

    pub(crate) fn with(configure: impl FnOnce(Builder) -> Builder) -> Self {
        Self::answering(configure, |number| {
            let response = Response::builder().status(201).header("location", "/payments/1");
            response.body(Body::from(format!("payment {number}"))).unwrap()
        })
    }

    /// Notes an effect on every request, and gives this answer to the n-th.
    pub(crate) fn answering<F>(configure: impl FnOnce(Builder) -> Builder, answer: F) -> Self
    where
        F: Fn(usize) -> Response<Body> + Clone + Send + Sync + 'static,
    {
        Self::running(configure, move |number| ready(answer(number)).boxed())
    }

    /// Notes an effect on every request, and then runs this for the n-th.
    pub(crate) fn running<F>(configure: impl FnOnce(Builder) -> Builder, run: F) -> Self
    where
        F: Fn(usize) -> BoxFuture<'static, Response<Body>> + Clone + Send + Sync + 'static,
    {
        Self::serving(configure, move |ledger| {
            let run = run.clone();
            Router::new().fallback(move |method: Method, uri: Uri, body: Bytes| {
                let body = String::from_utf8_lossy(&body);
                let number = ledger.note(format!("{method} {uri} {body}"));
                run(number)
            })
        })
    }

    /// As [`with`](Self::with), but every handler stops at the gate after its effect.
    pub(crate) fn gated(configure: impl FnOnce(Builder) -> Builder) -> (Self, Gate) {
        let gate = Gate::closed();
        let passed = gate.clone();
        let shop = Self::running(configure, move |number| {
            let gate = passed.clone();
            async move {
                gate.pass().await;
                Response::builder().status(201).body(format!("payment {number}").into()).unwrap()
            }
            .boxed()
        });
        (shop, gate)
    }

    pub(crate) fn serving(
        configure: impl FnOnce(Builder) -> Builder,
        routes: impl Fn(Ledger) -> Router + Send + Sync + 'static,
    ) -> Self {
        let scope = Scope::principal(account_of);
        let config = configure(Config::builder().scope(scope)).build().unwrap();
        let store = WatchedStore::new(MemoryStore::new());
        Self::start(config, store, Ledger::default(), Arc::new(routes), WaitLimits::default())
    }

    fn start(
        config: Config,
        store: WatchedStore,
        ledger: Ledger,
        routes: Routes,
        limits: WaitLimits,
    ) -> Self {
        let engine = Engine::with_limits(store.clone(), limits);
        let layer = IdempotencyLayer::on(engine, config.clone());
        let app = routes(ledger.clone()).layer(layer.clone());
        Self { ledger, store, layer, routes, config, app }
    }

    /// Another process: its own engine over the same store, the same handlers.
    pub(crate) fn second_process(&self) -> Self {
        self.second_process_with(self.config.clone())
    }

    /// Another process, deployed with another configuration.
    pub(crate) fn reconfigured(&self, configure: impl FnOnce(Builder) -> Builder) -> Self {
        let scope = Scope::principal(account_of);
        self.second_process_with(configure(Config::builder().scope(scope)).build().unwrap())
    }

    fn second_process_with(&self, config: Config) -> Self {
        let (store, ledger) = (self.store.clone(), self.ledger.clone());
        Self::start(config, store, ledger, Arc::clone(&self.routes), WaitLimits::default())
    }

    /// The same shop with other limits on waiting.
    pub(crate) fn limited(&self, per_key: usize, total: usize) -> Self {
        let mut limits = WaitLimits::default();
        limits.per_key = per_key;
        limits.total = total;
        let (store, ledger) = (self.store.clone(), self.ledger.clone());
        Self::start(self.config.clone(), store, ledger, Arc::clone(&self.routes), limits)
    }

    /// The same shop with something around the layer.
    pub(crate) fn wrapped(mut self, wrap: impl FnOnce(Router) -> Router) -> Self {
        self.app = wrap(self.app);
        self
    }

    /// The same shop with something between the layer and the handlers.
    pub(crate) fn lined(mut self, line: impl FnOnce(Router) -> Router) -> Self {
        self.app = line((self.routes)(self.ledger.clone())).layer(self.layer.clone());
        self
    }

    pub(crate) fn app(&self) -> Router {
        self.app.clone()
    }

    pub(crate) async fn send(&self, ask: &Ask) -> Seen {
        Seen::read(self.app.clone().oneshot(ask.request()).await.unwrap()).await
    }

    /// Sends from another task.
    pub(crate) fn sending(&self, ask: &Ask) -> JoinHandle<Seen> {
        let (shop, ask) = (self.clone(), ask.clone());
        tokio::spawn(async move { shop.send(&ask).await })
    }

    /// How many records the store holds.
    pub(crate) fn records(&self) -> usize {
        self.store.inner().len()
    }

    #[track_caller]
    pub(crate) fn expect_untouched(&self) {
        self.ledger.expect(0);
        assert_eq!(self.store.calls(), 0, "the {} store was asked", self.store.name());
    }
}
