//! The line of requests that wait for their turn in PostgreSQL: a connection that is handed on claims the next
//! key without a look.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "support/spoken.rs"]
mod spoken;
mod support;

use std::sync::Arc;

use futures_util::future::join_all;
use spoken::{
    BOUNDED, CLAIM, CLOSE, LOOK, PAY, RECORDS, Send, TRIES, World, all_back, fits, pay, serve,
};
use sqlx::Postgres;
use tokio::sync::Semaphore;
use tower_idempotency::PostgresStore;
use tower_idempotency::store::sql::{Tx, sqlx};

/// A store all of whose turns are taken, and one request that waits in the line for the connection of whoever took
/// the last one.
struct Line {
    store: PostgresStore,
    send: Send,
    /// Lets whoever took the last turn go.
    go: Arc<Semaphore>,
    stay: Arc<Semaphore>,
    begun: Arc<Semaphore>,
    held: Vec<tokio::task::JoinHandle<(u16, bool)>>,
}

impl Line {
    /// What the handler with the last turn says at its end. Every second one is on a pool of its own.
    async fn new(world: &World, round: usize, last: &'static str) -> Self {
        let mut store = PostgresStore::connect(&world.by_way).await.unwrap();
        if round % 2 == 1 {
            store = PostgresStore::builder(store.pool().clone()).hand_on(true).build();
        }
        let [begun, go, stay] = [0, 0, 0].map(|_| Arc::new(Semaphore::new(0)));
        let (tell, gate, end) = (Arc::clone(&begun), Arc::clone(&go), Arc::clone(&stay));
        let send = serve(store.clone(), move |mut tx: Tx<Postgres>, key, fence| {
            let (tell, gate, end) = (Arc::clone(&tell), Arc::clone(&gate), Arc::clone(&end));
            async move {
                if key.starts_with("stay") {
                    tell.add_permits(1);
                    end.acquire().await.unwrap().forget();
                } else if key.starts_with("last") {
                    tell.add_permits(1);
                    gate.acquire().await.unwrap().forget();
                    sqlx::raw_sql(last).execute(&mut tx).await.unwrap();
                }
                pay(tx, key, fence).await
            }
        });
        let turns = store.pool().options().get_max_connections() - 1;
        let warm = |n| send(&format!("warm-{round}-{n}"));
        drop(join_all((0..turns).map(warm)).await);
        all_back(store.pool()).await;
        let stays = |n| tokio::spawn(send(&format!("stay-{round}-{n}")));
        let held = (1..turns).map(stays).collect();
        begun.acquire_many(turns - 1).await.unwrap().forget();
        Self { store, send, go, stay, begun, held }
    }

    /// Sends one that takes the last turn, and one that waits for it. A connection that has been out of its pool for
    /// long is not handed on, so that this should be quick.
    async fn wait(&mut self, key: &str) -> tokio::task::JoinHandle<(u16, bool)> {
        self.held.push(tokio::spawn((self.send)(&format!("last-{key}"))));
        self.begun.acquire().await.unwrap().forget();
        let sent = tokio::spawn((self.send)(key));
        // A look beside the line may have found an answer already.
        while !format!("{:?}", self.store).contains("waiting: 1") && !sent.is_finished() {
            tokio::task::yield_now().await;
        }
        sent
    }

    async fn end(self) {
        self.stay.add_permits(self.held.len());
        assert!(join_all(self.held).await.into_iter().all(|told| told.unwrap() == (201, false)));
        all_back(self.store.pool()).await;
        self.store.pool().close().await;
    }
}

/// Whoever took longer than a connection is handed on, on a busy machine, did not see the case.
async fn until_seen(what: &str, mut round: impl AsyncFnMut(usize) -> bool) {
    for n in 0..TRIES {
        let seen = tokio::time::timeout(BOUNDED, round(n)).await;
        if seen.unwrap_or_else(|_| panic!("{what}: hangs in round {n}")) {
            return;
        }
    }
    panic!("{what}: never seen");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_connection_that_is_handed_on_a_new_key_is_claimed_without_a_look() {
    let world = World::new().await;
    for first in [0, 1] {
        until_seen("a claim without a look", async |round| {
            let round = first + 2 * round;
            let mut line = Line::new(&world, round, "SELECT 1").await;
            let sent = line.wait(&format!("k{round}")).await;
            drop(world.way.said());
            line.go.add_permits(1);
            assert_eq!(sent.await.unwrap(), (201, false));
            let said = world.way.said();
            line.end().await;
            // The other one's end, and then its own.
            let expected = ["SELECT 1", PAY, CLOSE, "COMMIT", CLAIM, PAY, CLOSE, "COMMIT"];
            fits(&said[..8.min(said.len())], &expected)
        })
        .await;
    }
    assert_eq!(world.open_transactions().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_without_a_look_of_a_key_that_has_its_answer_replays_it() {
    let world = World::new().await;
    let first = serve(PostgresStore::from_pool(world.watch.clone()), pay);
    until_seen("a claim without a look", async |round| {
        let key = format!("k{round}");
        assert_eq!(first(&key).await, (201, false));
        let mut line = Line::new(&world, round, "SELECT 1").await;
        let sent = line.wait(&key).await;
        drop(world.way.said());
        line.go.add_permits(1);
        assert_eq!(sent.await.unwrap(), (201, true));
        let said = world.way.said();
        line.end().await;
        fits(said.get(4..7).unwrap_or_default(), &[CLAIM, "ROLLBACK", LOOK])
    })
    .await;
    assert_eq!(world.open_transactions().await, 0);
    assert_eq!(world.effects().await, world.count(RECORDS).await, "one effect a key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_handed_on_and_dead_or_not_able_costs_no_request() {
    let world = World::new().await;
    let mut watch = world.watch.acquire().await.unwrap();
    let end = "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
                  AND state = 'idle' AND query = 'COMMIT'";
    until_seen("a dead connection", async |round| {
        let mut line = Line::new(&world, round, "SELECT 1").await;
        let sent = line.wait(&format!("k{round}")).await;
        drop(world.way.said());
        let gate = world.way.hold(CLAIM);
        line.go.add_permits(1);
        world.way.held().await;
        let said = world.way.said();
        let ended: i64 = sqlx::query_scalar(end).fetch_one(&mut *watch).await.unwrap();
        gate.add_permits(1);
        assert_eq!(sent.await.unwrap(), (201, false));
        line.end().await;
        ended > 0 && fits(&said, &["SELECT 1", PAY, CLOSE, "COMMIT", CLAIM])
    })
    .await;
    until_seen("a session that was reset", async |round| {
        let mut line =
            Line::new(&world, round + TRIES, "DEALLOCATE tower_idempotency_claim_3").await;
        let sent = line.wait(&format!("k{}", round + TRIES)).await;
        drop(world.way.said());
        line.go.add_permits(1);
        assert_eq!(sent.await.unwrap(), (201, false));
        let said = world.way.said();
        line.end().await;
        fits(said.get(4..6).unwrap_or_default(), &[CLAIM, "ROLLBACK"])
            && said.iter().any(|said| said.contains("PREPARE tower_idempotency_claim_3 "))
    })
    .await;
    drop(watch);
    assert_eq!(world.open_transactions().await, 0);
    assert_eq!(world.effects().await, world.count(RECORDS).await, "one effect a key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_beside_the_line_on_a_session_that_has_lost_what_was_prepared_costs_no_request() {
    let world = World::new().await;
    let mut line = Line::new(&world, 0, "SELECT 1").await;
    line.held.push(tokio::spawn((line.send)("stay-last")));
    line.begun.acquire().await.unwrap().forget();
    // The one connection that is kept out of the turns.
    assert_eq!((line.send)("warm-0-0").await, (201, true));
    for reset in ["DEALLOCATE ALL", "DISCARD ALL"] {
        sqlx::raw_sql(reset).execute(line.store.pool()).await.unwrap();
        assert_eq!((line.send)("warm-0-1").await, (201, true), "{reset}");
    }
    line.end().await;
    assert_eq!(world.open_transactions().await, 0);
}
