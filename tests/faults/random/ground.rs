//! Where the servers keep their records, and what goes wrong there: one Redis, a group that Sentinels watch, or a
//! cluster. The last two have replicas, and a write is believed when all of them have it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::Mutex as Turn;
use tokio::task::block_in_place;

use super::schedule::Kind;
use crate::groups::{RedisCluster, SentinelGroup, slot_of};
use crate::history::storage_key;
use crate::redis::RedisServer;

/// What moves between the masters of a cluster; half of all keys are in it.
const MOVING: Range<usize> = 0..32;
const MASTERS: usize = 3;
const REPLICAS_OF_A_PRIMARY: usize = 2;
/// A group has found itself again by then.
const PATIENCE: Duration = Duration::from_secs(40);

pub(super) struct Ground {
    kind: Group,
    url: String,
    errors: Mutex<Errors>,
}

/// One fault comes after the other, so each has the group for itself.
enum Group {
    Alone(RedisServer),
    Sentinels(Turn<SentinelGroup>),
    Cluster(Turn<RedisCluster>),
}

/// How often the servers have answered with an error, by its code. A server that is killed forgets it.
#[derive(Default)]
struct Errors {
    of_the_dead: BTreeMap<String, u64>,
    of_the_living: BTreeMap<u16, BTreeMap<String, u64>>,
}

impl Errors {
    fn look(&mut self, server: &RedisServer) {
        let said = server.cli(&["info", "errorstats"]);
        let errors = said.lines().filter_map(|line| {
            let (code, count) = line.strip_prefix("errorstat_")?.split_once(":count=")?;
            Some((code.to_owned(), count.trim().parse().ok()?))
        });
        self.of_the_living.insert(server.port(), errors.collect());
    }

    fn last_look(&mut self, server: &RedisServer) {
        self.look(server);
        for (code, count) in self.of_the_living.remove(&server.port()).expect("just looked at") {
            *self.of_the_dead.entry(code).or_default() += count;
        }
    }

    fn count(&self, code: &str) -> u64 {
        let all = self.of_the_living.values().chain([&self.of_the_dead]);
        all.filter_map(|errors| errors.get(code)).sum()
    }
}

impl Ground {
    fn new(kind: Group, url: String) -> Self {
        Self { kind, url, errors: Mutex::default() }
    }

    pub(super) fn alone() -> Self {
        let options = ["--enable-debug-command", "local", "--maxmemory-policy", "noeviction"];
        let redis = RedisServer::start_with(&options);
        let url = redis.url();
        Self::new(Group::Alone(redis), url)
    }

    pub(super) fn sentinels() -> Self {
        let group = SentinelGroup::start(REPLICAS_OF_A_PRIMARY);
        let url = group.url();
        Self::new(Group::Sentinels(Turn::new(group)), url)
    }

    pub(super) fn cluster() -> Self {
        let cluster = RedisCluster::start(MASTERS, 1);
        let url = cluster.url();
        Self::new(Group::Cluster(Turn::new(cluster)), url)
    }

    /// The address, for somebody who looks on.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// The address, for servers: they wait for all replicas.
    pub(super) fn url_of_servers(&self) -> String {
        match self.kind {
            Group::Alone(_) => self.url.clone(),
            Group::Sentinels(_) => format!("{}?wait={REPLICAS_OF_A_PRIMARY}", self.url),
            Group::Cluster(_) => format!("{}?wait=1", self.url),
        }
    }

    /// The port of the one server, to which a proxy may lead.
    pub(super) fn port(&self) -> Option<u16> {
        match &self.kind {
            Group::Alone(redis) => Some(redis.port()),
            Group::Sentinels(_) | Group::Cluster(_) => None,
        }
    }

    /// What an error code was answered with so far, as of the last fault.
    pub(super) fn errors(&self, code: &str) -> u64 {
        self.errors.lock().unwrap().count(code)
    }

    /// A key that begins like this; of the slots that move, if it shall be and something moves.
    pub(super) fn key(&self, start: String, moving: bool) -> String {
        if !moving || !matches!(self.kind, Group::Cluster(_)) {
            return start;
        }
        key_in(&MOVING, &start)
    }

    /// A key of the slot that is the last to be moved, so that it is open for longest.
    pub(super) fn key_of_last_slot(&self, source: &str, at: u64) -> String {
        key_in(&(MOVING.end - 1..MOVING.end), &format!("moved-{source}-{at}"))
    }

    /// Makes a fault, and takes it back. False if it certainly hit nobody.
    pub(super) async fn strike(&self, kind: Kind, lasts: Duration) -> bool {
        let hit = match &self.kind {
            Group::Alone(redis) => alone(redis, kind, lasts).await,
            Group::Sentinels(group) => {
                let mut group = group.lock().await;
                self.strike_sentinels(&mut group, kind, lasts).await
            }
            Group::Cluster(cluster) => {
                let mut cluster = cluster.lock().await;
                self.strike_cluster(&mut cluster, kind, lasts).await
            }
        };
        self.look_at_errors().await;
        hit
    }

    async fn look_at_errors(&self) {
        let look = |servers: &[RedisServer]| {
            block_in_place(|| {
                let mut errors = self.errors.lock().unwrap();
                servers.iter().for_each(|server| errors.look(server));
            });
        };
        match &self.kind {
            Group::Alone(redis) => look(std::slice::from_ref(redis)),
            Group::Sentinels(group) => look(&group.lock().await.servers),
            Group::Cluster(cluster) => look(&cluster.lock().await.nodes),
        }
    }

    async fn strike_sentinels(
        &self,
        group: &mut SentinelGroup,
        kind: Kind,
        lasts: Duration,
    ) -> bool {
        let port = block_in_place(|| group.primary_port());
        let is_primary = |server: &RedisServer| server.port() == port;
        let at = group.servers.iter().position(is_primary).expect("one of them");
        let hit = match kind {
            Kind::KillPrimary(_) => block_in_place(|| {
                self.errors.lock().unwrap().last_look(&group.servers[at]);
                group.servers[at].kill();
                group.wait_for_failover_from(port);
                let next = group.primary_port();
                // It comes back empty, as a replica. A Sentinel would tell it so after some seconds.
                group.servers[at].restart();
                group.servers[at].cli(&["replicaof", "127.0.0.1", &next.to_string()]);
                true
            }),
            Kind::StopReplica(number) => {
                let others = group.servers.iter().filter(|server| !is_primary(server));
                let replicas: Vec<_> = others.collect();
                let replica = replicas[number % replicas.len()];
                without(replica, &group.servers[at], lasts).await
            }
            _ => of_each(&group.servers[at], &group.servers, kind, lasts).await,
        };
        block_in_place(|| wait_for_a_primary(group));
        hit
    }

    async fn strike_cluster(
        &self,
        cluster: &mut RedisCluster,
        kind: Kind,
        lasts: Duration,
    ) -> bool {
        let shards = block_in_place(|| shards(cluster));
        let hit = match kind {
            Kind::KillPrimary(number) => block_in_place(|| {
                let (master, replica) = shards[number % MASTERS];
                self.errors.lock().unwrap().last_look(&cluster.nodes[master]);
                cluster.nodes[master].kill();
                let takes_over = |said: &str| said.starts_with("master");
                cluster.nodes[replica].wait_until("it takes over", &["role"], takes_over);
                // It comes back empty, and learns that it is a replica.
                cluster.nodes[master].restart();
                true
            }),
            Kind::StopReplica(number) => {
                let (master, replica) = shards[number % MASTERS];
                without(&cluster.nodes[replica], &cluster.nodes[master], lasts).await
            }
            Kind::MoveSlots(number) => block_in_place(|| {
                let (home, away) = (shards[0].0, shards[1 + number % (MASTERS - 1)].0);
                for (from, to) in [(home, away), (away, home)] {
                    // All are open at first: what is new is asked for at the other end.
                    MOVING.for_each(|slot| cluster.open_slot(slot, from, to));
                    MOVING.for_each(|slot| cluster.move_slot(slot, from, to));
                }
                true
            }),
            _ => of_each(&cluster.nodes[shards[0].0], &cluster.nodes, kind, lasts).await,
        };
        block_in_place(|| wait_for_agreement(cluster));
        hit
    }
}

/// A key that begins like this, of one of these slots.
fn key_in(slots: &Range<usize>, start: &str) -> String {
    let mut keys = (0..).map(|number: u32| format!("{start}-{number}"));
    let is_in = |key: &String| slots.contains(&slot_of(&storage_key(key).to_text()));
    keys.find(is_in).expect("one of many")
}

/// Waits until the server that the Sentinels name is a primary with all its replicas. Where a machine is slow they
/// may have elected another one meanwhile, although nobody died.
fn wait_for_a_primary(group: &SentinelGroup) {
    let end = Instant::now() + PATIENCE;
    loop {
        let port = group.primary_port();
        let primary = group.servers.iter().find(|server| server.port() == port);
        let said = primary.expect("one of them").cli(&["info", "replication"]);
        let replicas = said.matches("state=online").count();
        if said.contains("role:master") && replicas == REPLICAS_OF_A_PRIMARY {
            return;
        }
        assert!(Instant::now() < end, "the group has no primary with its replicas: {said}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Master and replica of each part of a cluster, by their number.
fn shards(cluster: &RedisCluster) -> [(usize, usize); MASTERS] {
    std::array::from_fn(|number| {
        let (one, other) = (number, number + MASTERS);
        let leads = cluster.nodes[one].cli(&["role"]).starts_with("master");
        if leads { (one, other) } else { (other, one) }
    })
}

/// Waits until all nodes of a cluster see the same masters with the same slots, each with its replica.
fn wait_for_agreement(cluster: &RedisCluster) {
    let view = |node: &RedisServer| {
        let said = node.cli(&["cluster", "nodes"]);
        let nodes: Vec<Vec<&str>> = said.lines().map(|line| line.split(' ').collect()).collect();
        let of_kind =
            |kind| nodes.iter().filter(move |node| node[2].trim_start_matches("myself,") == kind);
        let mut masters: Vec<String> =
            of_kind("master").map(|node| format!("{} {:?}", node[0], &node[8..])).collect();
        masters.sort();
        let well = masters.len() == MASTERS
            && of_kind("slave").count() == MASTERS
            && nodes.iter().all(|node| node[7] == "connected" || node[2].starts_with("myself"));
        let state = node.cli(&["cluster", "info"]);
        (well && state.contains("cluster_state:ok")).then_some(masters)
    };
    let end = Instant::now() + PATIENCE;
    loop {
        let views: Vec<_> = cluster.nodes.iter().map(view).collect();
        if views[0].is_some() && views.iter().all(|view| *view == views[0]) {
            break;
        }
        assert!(Instant::now() < end, "the cluster does not agree: {views:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    for (master, _) in shards(cluster) {
        cluster.nodes[master].wait_for_sync(1);
    }
}

/// A replica that is frozen: writes on its primary wait for it. False if none did.
async fn without(replica: &RedisServer, primary: &RedisServer, lasts: Duration) -> bool {
    let (end, mut waited) = (Instant::now() + lasts, false);
    replica.stop();
    while Instant::now() < end {
        let clients = block_in_place(|| primary.cli(&["info", "clients"]));
        waited |= !clients.contains("blocked_clients:0");
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    replica.cont();
    waited
}

/// What may happen to one server or to all of them.
async fn of_each(one: &RedisServer, all: &[RedisServer], kind: Kind, lasts: Duration) -> bool {
    let tell_all = |command: &[&str], refused: &str| {
        block_in_place(|| all.iter().filter(|server| server.cli(command) != refused).count() > 0)
    };
    match kind {
        Kind::KillClients => tell_all(&["client", "kill", "type", "normal"], "0"),
        Kind::FlushScripts => tell_all(&["script", "flush"], ""),
        Kind::Freeze | Kind::Outage => {
            one.stop();
            tokio::time::sleep(lasts).await;
            one.cont();
            true
        }
        other => panic!("{other:?} is nothing that can happen here"),
    }
}

async fn alone(redis: &RedisServer, kind: Kind, lasts: Duration) -> bool {
    let cli = |command: &[&str]| block_in_place(|| redis.cli(command));
    match kind {
        Kind::PauseWrites => {
            cli(&["client", "pause", &lasts.as_millis().to_string(), "write"]);
            tokio::time::sleep(lasts).await;
            true
        }
        Kind::DebugSleep => {
            cli(&["debug", "sleep", &lasts.as_secs_f64().to_string()]);
            true
        }
        Kind::Full => {
            cli(&["config", "set", "maxmemory", "1"]);
            tokio::time::sleep(lasts).await;
            cli(&["config", "set", "maxmemory", "0"]);
            cli(&["info", "errorstats"]).contains("errorstat_OOM")
        }
        _ => of_each(redis, std::slice::from_ref(redis), kind, lasts).await,
    }
}
