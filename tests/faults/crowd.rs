//! Clients that pay while a fault is going on, each under a new key every time, and each twice at once: at
//! the first server and at the second.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::history::History;
use crate::invariants::End;
use crate::site::{Pair, USUAL};

/// Servers that have lost their store find it again sooner, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The keys that are paid under, in this order.
type Keys = Mutex<Box<dyn Iterator<Item = String> + Send>>;

pub(crate) struct Crowd {
    clients: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

struct Shared {
    history: History,
    keys: Keys,
    sources: &'static [&'static str],
    stop: AtomicBool,
    paid: AtomicUsize,
}

impl Crowd {
    pub(crate) fn start(pair: &Pair, clients: usize, sources: &'static [&'static str]) -> Self {
        let keys = (0..).map(|number| format!("crowd-{number}"));
        Self::under_keys(pair, clients, sources, keys)
    }

    pub(crate) fn under_keys(
        pair: &Pair,
        clients: usize,
        sources: &'static [&'static str],
        keys: impl Iterator<Item = String> + Send + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            history: pair.history.clone(),
            keys: Mutex::new(Box::new(keys)),
            sources,
            stop: AtomicBool::new(false),
            paid: AtomicUsize::new(0),
        });
        let servers = [pair.one.address, pair.two.address];
        let clients = (0..clients)
            .map(|client| tokio::spawn(Arc::clone(&shared).go(client, servers)))
            .collect();
        Self { clients, shared }
    }

    /// Waits until this many keys more are paid, so that no fault hits an idle store, and none is survived by
    /// nobody.
    pub(crate) async fn go_on(&self, more: usize) {
        let paid = || self.shared.paid.load(Ordering::SeqCst);
        let (goal, end) = (paid() + more, Instant::now() + PATIENCE);
        while paid() < goal {
            assert!(Instant::now() < end, "nobody is served: {:?}", self.shared.history.ends());
            assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client has given up");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until so many more requests ended like this.
    pub(crate) async fn have_ended(&self, how: &str, more: usize) {
        let ended = || self.shared.history.ends().get(how).copied().unwrap_or_default();
        let (goal, end) = (ended() + more, Instant::now() + PATIENCE);
        while ended() < goal {
            assert!(Instant::now() < end, "no {how}: {:?}", self.shared.history.ends());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets every client finish what it is at. How many keys were paid.
    pub(crate) async fn finish(self) -> usize {
        self.shared.stop.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.expect("a client ends well");
        }
        let paid = self.shared.paid.load(Ordering::SeqCst);
        println!("{paid} keys paid: {:?}", self.shared.history.ends());
        paid
    }
}

impl Shared {
    async fn go(self: Arc<Self>, client: usize, [one, two]: [SocketAddr; 2]) {
        for payment in client.. {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let key = self.keys.lock().expect("no holder panics").next().expect("a key");
            let source = self.sources[payment % self.sources.len()];
            let (here, there) = ([one, two], [two, one]);
            let (here, there) = tokio::join!(
                self.history.pay_surely(&here, &key, source, USUAL),
                self.history.pay_surely(&there, &key, source, USUAL),
            );
            if let (End::Paid { .. }, End::Paid { .. }) = (here, there) {
                self.paid.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}
