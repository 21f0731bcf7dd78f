//! A place for servers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::line::Proxy;
use crate::sandbox::Sandbox;

/// One server after another in the same place, and the way from there to Redis.
pub(super) struct Seat {
    /// There is none on the way to a group: its servers tell each other's true addresses.
    pub(super) proxy: Option<Proxy>,
    /// The address of the store without a proxy.
    pub(super) url: String,
    pub(super) ledger: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) server: Mutex<Option<Sandbox>>,
    address: Mutex<SocketAddr>,
    /// Counts the servers that sat here.
    pub(super) life: AtomicU64,
}

impl Seat {
    pub(super) fn new(
        proxy: Option<Proxy>,
        url: String,
        ledger: PathBuf,
        args: Vec<String>,
    ) -> Self {
        let address = Mutex::new(([127, 0, 0, 1], 0).into());
        let seat = Self {
            proxy,
            url,
            ledger,
            args,
            server: Mutex::default(),
            address,
            life: AtomicU64::new(0),
        };
        tokio::task::block_in_place(|| seat.start());
        seat
    }

    /// Starts a server. One that is started while Redis is out of order says so and ends, and whatever looks
    /// after it starts it again.
    pub(super) fn start(&self) {
        let url = self.proxy.as_ref().map_or_else(|| self.url.clone(), Proxy::redis_url);
        let args = self.args.iter().map(String::as_str);
        let args: Vec<&str> = ["--store", &url].into_iter().chain(args).collect();
        let end = Instant::now() + Duration::from_secs(20);
        let server = loop {
            match Sandbox::try_telling_runs(Some(&self.ledger), &args) {
                Ok(server) => break server,
                Err(said) => assert!(Instant::now() < end, "no start: {said}"),
            }
        };
        *self.address.lock().unwrap() = server.address;
        *self.server.lock().unwrap() = Some(server);
        self.life.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn address(&self) -> SocketAddr {
        *self.address.lock().unwrap()
    }

    /// Another server after this one, which is sent a signal that ends it. It is handed to `ended` once it is gone.
    pub(super) fn replace(&self, signal: &str, ended: impl FnOnce(&Sandbox, ExitStatus)) {
        let mut server = self.server.lock().unwrap().take().expect("it lives");
        server.signal(signal);
        let status = server.ended();
        ended(&server, status);
        drop(server);
        self.start();
    }

    pub(super) fn signal(&self, name: &str) {
        self.server.lock().unwrap().as_ref().unwrap().signal(name);
    }
}
