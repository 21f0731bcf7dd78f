//! The load: connections that send one request after the other, and what came back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use crate::{REPLAYED, process};

const CONNECTIONS: usize = 64;
/// What a payment weighs.
const ORDER: usize = 200;

/// What is sent, and for how long.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    keys: Keys,
    path: &'static str,
    window: Duration,
    /// Requests a second; as many as go through if nothing is said.
    rate: Option<f64>,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Keys {
    Fresh,
    Replayed,
    /// One in five is replayed.
    Mixed,
    /// All connections send the same key, and then all the next one.
    Storm,
}

/// How often there is a storm, if that does not depend on how long the answers take: a little longer than the handler
/// does.
const STORM_EVERY: Duration = Duration::from_millis(60);

impl Plan {
    pub(crate) fn of(workload: &str, window: Duration) -> Self {
        let (keys, path) = match workload {
            "W2" => (Keys::Replayed, "/v1/payments"),
            "W3" => (Keys::Mixed, "/v1/payments"),
            "W4" | "W4-refused" | "W4-paced" => (Keys::Storm, "/v1/payments/slow"),
            "W5" => (Keys::Fresh, "/v1/payments/large"),
            "W5R" => (Keys::Replayed, "/v1/payments/large"),
            "open" => (Keys::Fresh, "/open/payments"),
            _ => (Keys::Fresh, "/v1/payments"),
        };
        let rate = match workload {
            "W1@2000" => Some(2_000.0),
            "W4-paced" => Some(CONNECTIONS as f64 / STORM_EVERY.as_secs_f64()),
            _ => None,
        };
        Self { keys, path, window, rate }
    }

    /// A plan that sends so many fresh keys is one of a long window that somebody else ends.
    pub(crate) fn fresh(window: Duration) -> Self {
        Self::of("W1", window)
    }
}

/// One run.
pub(crate) struct Load {
    pub(crate) port: u16,
    pub(crate) plan: Plan,
    pub(crate) round: usize,
}

/// What came of a run.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) requests: usize,
    pub(crate) took: Duration,
    /// Processor time of the server and of Redis.
    pub(crate) used: [Duration; 2],
    /// Sorted.
    latencies: Vec<Duration>,
    statuses: BTreeMap<u16, usize>,
    /// Handlers that ran, for each key that was sent.
    pub(crate) runs_per_key: f64,
}

impl Ran {
    pub(crate) fn per_second(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }

    pub(crate) fn percentile(&self, part: f64) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        let index = (last as f64 * part).round() as usize;
        self.latencies.get(index).copied().unwrap_or_default()
    }

    pub(crate) fn statuses(&self) -> String {
        let each = self.statuses.iter().map(|(status, count)| format!("{status}: {count}"));
        each.collect::<Vec<_>>().join(", ")
    }
}

/// What the connections of a run share.
struct Shared {
    name: String,
    plan: Plan,
    port: u16,
    next: Cell<usize>,
    began: Instant,
    latencies: RefCell<Vec<Duration>>,
    statuses: RefCell<BTreeMap<u16, usize>>,
}

impl Load {
    pub(crate) async fn run(&self, watched: [u32; 2]) -> Ran {
        let name = format!("{}-{}-{}", self.port, self.round, std::process::id());
        if matches!(self.plan.keys, Keys::Replayed | Keys::Mixed) {
            self.send(&format!("{name}-old"), Some(REPLAYED), self.plan.window).await;
        }
        let executed = executions(self.port).await;
        let before = watched.map(process::used);
        let began = Instant::now();
        let shared = self.send(&name, None, self.plan.window).await;
        let took = began.elapsed();
        let after = watched.map(process::used);
        let executed = executions(self.port).await - executed;
        let mut latencies = shared.latencies.take();
        latencies.sort_unstable();
        let keys = match self.plan.keys {
            Keys::Fresh => latencies.len(),
            Keys::Replayed => usize::MAX,
            Keys::Mixed => latencies.len() - latencies.len() / 5,
            Keys::Storm => shared.next.get().div_ceil(CONNECTIONS),
        };
        Ran {
            requests: latencies.len(),
            took,
            used: [after[0] - before[0], after[1] - before[1]],
            latencies,
            statuses: shared.statuses.take(),
            runs_per_key: executed as f64 / keys.max(1) as f64,
        }
    }

    /// Sends so many requests with fresh keys.
    pub(crate) async fn fill(&self, count: usize) {
        self.send("fill", Some(count), Duration::MAX).await;
    }

    async fn send(&self, name: &str, count: Option<usize>, window: Duration) -> Rc<Shared> {
        let mut plan = self.plan;
        if count.is_some() {
            (plan.keys, plan.rate) = (Keys::Fresh, None);
        }
        let shared = Rc::new(Shared {
            name: name.to_owned(),
            plan,
            port: self.port,
            next: Cell::new(0),
            began: Instant::now(),
            latencies: RefCell::default(),
            statuses: RefCell::default(),
        });
        let local = LocalSet::new();
        for index in 0..CONNECTIONS {
            local.spawn_local(connection(Rc::clone(&shared), index, count, window));
        }
        local.await;
        shared
    }
}

async fn connection(shared: Rc<Shared>, index: usize, count: Option<usize>, window: Duration) {
    let mut client = Client::connect(shared.port).await;
    let mut sent = 0;
    loop {
        let number = shared.next.get();
        let over = match count {
            Some(count) => number >= count,
            None => shared.began.elapsed() >= window,
        };
        if over {
            return;
        }
        shared.next.set(number + 1);
        let name = &shared.name;
        let old = || uuid(&format!("{name}-old"), number % REPLAYED);
        let key = match shared.plan.keys {
            Keys::Fresh => uuid(name, number),
            Keys::Replayed => old(),
            Keys::Mixed if number.is_multiple_of(5) => old(),
            Keys::Mixed => uuid(name, number),
            Keys::Storm => uuid(name, number / CONNECTIONS),
        };
        let due = match shared.plan.rate {
            None => Instant::now(),
            Some(rate) => {
                let each = CONNECTIONS as f64 / rate;
                // A storm comes at once, everything else evenly.
                let share = match shared.plan.keys {
                    Keys::Storm => 0.0,
                    Keys::Fresh | Keys::Replayed | Keys::Mixed => index as f64 / CONNECTIONS as f64,
                };
                let offset = each * (sent as f64 + share);
                let due = shared.began + Duration::from_secs_f64(offset);
                tokio::time::sleep_until(due.into()).await;
                due
            }
        };
        sent += 1;
        let status = client.post(shared.plan.path, &key).await;
        shared.latencies.borrow_mut().push(due.elapsed());
        *shared.statuses.borrow_mut().entry(status).or_default() += 1;
    }
}

/// A key as clients send it: one that says nothing of those before it. A table in the order of keys that
/// count upwards would be written at its end only, as no service's is.
fn uuid(name: &str, number: usize) -> String {
    let half = |which: u8| {
        let mut hasher = DefaultHasher::new();
        (name, number, which).hash(&mut hasher);
        hasher.finish()
    };
    let (first, second) = (half(0), half(1));
    format!(
        "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
        first >> 32,
        first >> 16 & 0xffff,
        first & 0xfff,
        second >> 48 & 0xfff,
        second & 0xffff_ffff_ffff
    )
}

/// A connection that reads no more of an answer than its status and its length.
struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    async fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("the server listens");
        stream.set_nodelay(true).expect("a connection of its own");
        Self { stream, buffer: Vec::with_capacity(128 * 1024) }
    }

    async fn post(&mut self, path: &str, key: &str) -> u16 {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             idempotency-key: {key}\r\ncontent-length: {ORDER}\r\n\r\n"
        );
        let request = [head.as_bytes(), &[b'x'; ORDER]].concat();
        self.exchange(&request).await.0
    }

    async fn exchange(&mut self, request: &[u8]) -> (u16, Vec<u8>) {
        self.stream.write_all(request).await.expect("the server reads");
        self.buffer.clear();
        loop {
            let read = self.stream.read_buf(&mut self.buffer).await.expect("the server answers");
            assert!(read > 0, "the server closed a connection");
            let Some(end) = self.buffer.windows(4).position(|end| end == b"\r\n\r\n") else {
                continue;
            };
            let head = std::str::from_utf8(&self.buffer[..end]).expect("a head is text");
            let status = head[9..12].parse().expect("a status");
            let length = head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
            });
            let whole = end + 4 + length.unwrap_or(0_usize);
            while self.buffer.len() < whole {
                let read = self.stream.read_buf(&mut self.buffer).await.expect("it goes on");
                assert!(read > 0, "the server closed a connection in an answer");
            }
            return (status, self.buffer[end + 4..whole].to_vec());
        }
    }
}

async fn executions(port: u16) -> usize {
    let mut client = Client::connect(port).await;
    let (_, body) = client.exchange(b"GET /executions HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    String::from_utf8_lossy(&body).trim().parse().expect("a number")
}
