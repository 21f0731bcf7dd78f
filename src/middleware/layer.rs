//! The layer.

use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::service::Idempotency;
use crate::config::Config;
use crate::engine::{Drained, Engine};
use crate::store::Store;

/// Puts [`Idempotency`] around a service. See the [module](super) for what it does.
///
/// # Clone
/// Clones share the engine: the store, the running handlers and the limits on waiting.
#[derive(Clone, Debug)]
pub struct IdempotencyLayer {
    engine: Engine,
    config: Arc<Config>,
}

impl IdempotencyLayer {
    /// A layer with these rules on this store.
    pub fn new(config: Config, store: impl Store) -> Self {
        Self::on(Engine::new(store), config)
    }

    /// A layer with these rules on an engine that exists already.
    #[must_use]
    pub fn on(engine: Engine, config: Config) -> Self {
        Self { engine, config: Arc::new(config) }
    }

    /// A layer with other rules on the same engine: for routes that differ, and for nothing else,
    /// since one engine means one shutdown and one limit on waiting. If its
    /// [`Recipe`](crate::Recipe) is another one, let each of the two
    /// [accept](crate::ConfigBuilder::also_accept) the other's, so that a key which is used on both kinds
    /// of route is a mismatch (422) and not a record that cannot be read (503).
    #[must_use]
    pub fn with_config(&self, config: Config) -> Self {
        Self::on(self.engine.clone(), config)
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        self.engine.store()
    }

    /// Shuts the engine down: no new claims, running handlers get `grace` to finish, and the keys of
    /// those that are left are marked as of unknown outcome. Call it after the server has stopped
    /// accepting, and before the runtime ends.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting, not the handlers. See [`Engine::drain`].
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.engine.drain(grace).await
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency::new(inner, self.engine.clone(), Arc::clone(&self.config))
    }
}
