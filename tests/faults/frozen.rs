//! A Redis that freezes while five hundred requests are in flight, at all that a request does.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tower_idempotency::record::State;

use crate::history::{History, record};
use crate::invariants::{End, Promise};
use crate::load::number;
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Call, Connection, Sandbox};
use crate::site::{Site, USUAL, is, is_paid, sleep};

/// In their handlers, when it freezes; and longer than the rest takes until then.
const RUNNING: (usize, &str) = (100, "tok_charge_then_slow_12000");
/// Whose handlers have ended: what is in flight is the completion.
const COMPLETING: (usize, &str) = (50, "tok_charge_then_slow_7000");
/// Twins of the running ones at the other server.
const WAITING: usize = 50;
const CLAIMING: usize = 300;
const IN_FLIGHT: usize = RUNNING.0 + COMPLETING.0 + WAITING + CLAIMING;

struct Ended {
    answer: Answer,
    asked: Instant,
    answered: Instant,
}

type Asked = tokio::task::JoinHandle<Ended>;

/// How many have asked so far.
static HAVE_ASKED: AtomicUsize = AtomicUsize::new(0);

fn ask(history: &History, to: SocketAddr, key: String, source: &'static str) -> Asked {
    let history = history.clone();
    tokio::spawn(async move {
        let mut connection = Connection::open(to).await.unwrap();
        let asked = Instant::now();
        HAVE_ASKED.fetch_add(1, Ordering::SeqCst);
        let answer = history.ask_on(&mut connection, &key, source, USUAL).await;
        Ended { answer: answer.expect("an answer"), asked, answered: Instant::now() }
    })
}

/// How many bytes of requests have come to a Redis that it does not look at.
fn unread(redis: &RedisServer) -> usize {
    let clients = redis.cli(&["client", "list", "type", "normal"]);
    let words = clients.split([' ', '\n']);
    let sizes = words.filter_map(|word| word.strip_prefix("qbuf=")?.parse::<usize>().ok());
    sizes.sum()
}

/// A value of a gauge of a server.
async fn gauge(server: &Sandbox, name: &str) -> usize {
    let page = server.send(Call::get("/metrics")).await.body;
    let page = String::from_utf8_lossy(&page).into_owned();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    value.map_or(0, |value| value as usize)
}

async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done().await {
        assert!(Instant::now() < end, "{what}");
        sleep(5).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_frozen_under_load_ends_every_request_within_bounds_and_recovers() {
    let frozen_for = Duration::from_secs(number("FAULTS_FROZEN_SECONDS", 10));
    let site = Site::start(&["--wait", "10"]).await;
    let (one, two) = (site.one.address, site.two.address);
    let ask_all = |to, kind: &'static str, (count, source)| -> Vec<Asked> {
        let keys = (0..count).map(|n| format!("{kind}-{n}"));
        keys.map(|key| ask(&site.history, to, key, source)).collect()
    };
    let running = ask_all(one, "running", RUNNING);
    site.charged(RUNNING.0 as u64).await;
    // By themselves, so that they end soon one after the other, also on a busy machine, and none before this is seven
    // seconds ago.
    let begun = Instant::now();
    let completing = ask_all(one, "completing", COMPLETING);
    let ran = RUNNING.0 + COMPLETING.0;
    site.charged(ran as u64).await;
    let waiting = ask_all(two, "running", (WAITING, RUNNING.1));
    until("no twin waits", async || gauge(&site.two, "idempotency_waiting ").await == WAITING)
        .await;
    // Before these handlers end, and not much before: a
    // twin that asks meanwhile is given up after a second and a half.
    tokio::time::sleep_until((begun + Duration::from_millis(6_600)).into()).await;
    // First no write is answered, which lets every request come to where it waits for one: this is no
    // moment at which a server could be caught.
    site.redis.cli(&["client", "pause", "600000", "write"]);
    let answers = || site.one.said().1.matches("payments::runs: answers").count();
    until("no handler ends", async || answers() == COMPLETING.0).await;
    let before = unread(&site.redis);
    let claiming = ask_all(one, "claiming", (CLAIMING, "tok_visa"));
    until("not all ask", async || HAVE_ASKED.load(Ordering::SeqCst) == IN_FLIGHT).await;
    // Of claims the store's connection takes some at a time; each has more bytes than that.
    until("no claim comes", async || unread(&site.redis) >= before + 20 * 100).await;
    site.redis.stop();
    let frozen = Instant::now();
    assert_eq!(answers(), COMPLETING.0, "the others are still in their handlers");
    assert_eq!(site.two.charges().await, ran as u64);

    let mut longest = Duration::ZERO;
    let mut in_flight = 0;
    let mut refused = 0;
    for (requests, runs) in
        [(running, true), (completing, true), (waiting, false), (claiming, false)]
    {
        for request in requests {
            let Ended { answer, asked, answered } = request.await.unwrap();
            assert!(asked < frozen && frozen < answered, "it was not in flight: {answer:?}");
            in_flight += 1;
            longest = longest.max(answered - frozen);
            // The limits of the store; and what is left of a handler before them.
            let limit = Duration::from_secs(if runs { 11 } else { 5 });
            assert!(answered - frozen < limit, "{:?}: {answer:?}", answered - frozen);
            if runs {
                // Nobody else will run it, so what it says stays true.
                let told = (answer.status.as_u16(), answer.header("idempotency-status"));
                assert_eq!(told, (201, Some("not-stored")), "{answer:?}");
            } else {
                is(&answer, 503, "idempotency_store_unavailable");
                assert!(answer.header("retry-after").is_some(), "{answer:?}");
                refused += 1;
            }
        }
    }
    assert_eq!((in_flight, refused), (IN_FLIGHT, WAITING + CLAIMING));
    tokio::time::sleep(frozen_for.saturating_sub(frozen.elapsed())).await;
    assert_eq!(site.two.charges().await, ran as u64, "nothing starts that could not be stored");

    site.redis.cont();
    site.redis.cli(&["client", "unpause"]);
    let thawed = Instant::now();
    // What has run is recorded by those who ran it, without anybody asking for it.
    let store = site.store().await;
    for (kind, count) in [("running", RUNNING.0), ("completing", COMPLETING.0)] {
        for n in 0..count {
            until("what has run is not recorded", async || {
                let record = record(&store, &format!("{kind}-{n}")).await;
                record.is_some_and(|record| matches!(record.state, State::Completed { .. }))
            })
            .await;
        }
    }
    for (kind, (count, source)) in [("running", RUNNING), ("completing", COMPLETING)] {
        for n in 0..count {
            let end = site.settled(&format!("{kind}-{n}"), source).await;
            assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
        }
    }
    for n in 0..CLAIMING {
        is_paid(&site.settled(&format!("claiming-{n}"), "tok_visa").await);
    }
    println!(
        "{IN_FLIGHT} requests in flight: the longest took {longest:?}; all paid {:?} after",
        thawed.elapsed()
    );
    assert_eq!(site.two.charges().await, (ran + CLAIMING) as u64);
    site.check(Promise::AtMostOnce).await;
}
