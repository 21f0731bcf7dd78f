//! C12 on a group that Sentinels watch: a claim that reaches one of two replicas, and the other one is promoted.
//!
//! Of replicas in equal standing Sentinels take the one that has most of the stream, which would hide what is shown here
//! by luck: an operator's `replica-priority` goes before that. So the one that lags behind has the better priority.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::failover::{by_key, pair_of};
use crate::groups::SentinelGroup;
use crate::invariants::{End, Promise};
use crate::line::{Proxy, Way};
use crate::site::{Pair, is, is_paid};

const PRIMARY: usize = 0;
const LAGGARD: usize = 2;

/// A group with two replicas, the second of which is the one that Sentinels promote, and the way of the stream to it.
struct Lagging {
    group: SentinelGroup,
    stream: Proxy,
}

impl Lagging {
    async fn start() -> Self {
        let group = SentinelGroup::start(2);
        let laggard = &group.servers[LAGGARD];
        laggard.cli(&["config", "set", "replica-priority", "1"]);
        let port = format!("127.0.0.1:{}", laggard.port());
        for sentinel in &group.sentinels {
            sentinel.wait_until(
                "the priority is known",
                &["sentinel", "replicas", "main"],
                |said| {
                    let of_it = said.split("name\n").find(|one| one.starts_with(&port));
                    of_it.is_some_and(|one| one.contains("slave-priority\n1\n"))
                },
            );
        }
        let stream = Proxy::to(group.servers[PRIMARY].port()).await;
        Self { group, stream }
    }

    /// From here on the second replica gets nothing. A Sentinel would lead it back to its primary after eight
    /// seconds; by then there has to be another one.
    async fn cut_stream(&self) {
        let (primary, laggard) = (&self.group.servers[PRIMARY], &self.group.servers[LAGGARD]);
        laggard.cli(&["replicaof", "127.0.0.1", &self.stream.port().to_string()]);
        primary.wait_for_replicas(2);
        self.stream.swallow(Way::Down);
    }

    fn records(&self) -> [usize; 3] {
        [0, 1, 2].map(|server| {
            let keys = self.group.servers[server].cli(&["keys", "idem:*"]);
            keys.lines()
                .filter(|key| !key.contains("ready") && !key.ends_with("AAAAAAAAAA}"))
                .count()
        })
    }

    /// The primary dies; gives when the second replica is one, with the first as its replica.
    async fn fail_over(&mut self) {
        assert!(self.stream.hits() > 0, "the fault was never hit: nothing was swallowed");
        let first = self.group.servers[PRIMARY].port();
        self.group.servers[PRIMARY].kill();
        self.group.wait_for_failover_from(first);
        let promoted = self.group.primary_port();
        assert_eq!(promoted, self.group.servers[LAGGARD].port(), "the other one was promoted");
        // It comes back empty, as a replica. A Sentinel would tell it so after some seconds.
        self.group.servers[PRIMARY].restart();
        self.group.servers[PRIMARY].cli(&["replicaof", "127.0.0.1", &promoted.to_string()]);
        self.group.servers[LAGGARD].wait_for_sync(2);
    }
}

/// What both begin with: something paid that everybody has, and a claim that only two of three servers get.
async fn a_claim_that_one_replica_gets(wait: usize) -> (Lagging, Pair, crate::sandbox::Answer) {
    let mut lagging = Lagging::start().await;
    let pair = pair_of(&lagging.group, wait);
    is_paid(&pair.settled("before", "tok_visa").await);
    lagging.cut_stream().await;
    let all = lagging.records();
    assert_eq!(all, [1, 1, 1]);
    let cut = Instant::now();
    let answer = pair.ask_one("k", "tok_visa").await;
    // Also where it was not believed, it may be there until it is given up.
    println!("wait={wait}: {}, and the servers hold {:?}", answer.status, lagging.records());
    lagging.fail_over().await;
    println!("another primary {:?} after the cut", cut.elapsed());
    let end = pair.settled("before", "tok_visa").await;
    assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
    (lagging, pair, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_claim_that_one_of_two_replicas_has_is_not_believed_with_wait_on_both() {
    let (lagging, pair, answer) = a_claim_that_one_replica_gets(2).await;
    is(&answer, 503, "idempotency_store_unavailable");
    assert_eq!(pair.two.charges().await, 1, "nothing has run under it");
    let end = pair.settled("k", "tok_visa").await;
    assert!(matches!(end, End::Paid { replay: false, .. }), "{end:?}");
    assert!(pair.ask_two("k", "tok_visa").await.is_replay());
    assert_eq!(pair.two.charges().await, 2);
    pair.check_at(&lagging.group.url(), Promise::AtMostOnce).await;
}

/// The window that is left when one waits for fewer than all: as the README says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_claim_that_one_of_two_replicas_has_is_believed_and_forgotten_with_wait_on_one() {
    let (lagging, pair, answer) = a_claim_that_one_replica_gets(1).await;
    assert_eq!((answer.status.as_u16(), answer.header("idempotency-status")), (201, None));
    assert_eq!(pair.two.charges().await, 2);
    let end = pair.settled("k", "tok_visa").await;
    assert!(matches!(end, End::Paid { replay: false, .. }), "{end:?}");
    assert_eq!(pair.two.charges().await, 3);
    let broken = pair.broken_at(&lagging.group.url(), Promise::AtMostOnce).await;
    assert_eq!(by_key(&broken), BTreeSet::from([("k", "I1"), ("k", "I2")]), "{broken:#?}");
}
