//! Groups of servers: replicas under Sentinels, and clusters.

use std::time::{Duration, Instant};

use super::redis::RedisServer;

/// A primary, its replicas, and three Sentinels that watch them.
#[derive(Debug)]
pub struct SentinelGroup {
    /// The first one began as primary.
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<RedisServer>,
}

impl SentinelGroup {
    pub fn start(replicas: usize) -> Self {
        let primary = RedisServer::start();
        let port = primary.port();
        let mut servers = vec![primary];
        for _ in 0..replicas {
            servers.push(servers[0].start_replica(port));
        }
        servers[0].wait_for_replicas(replicas);
        let sentinels: Vec<_> = (0..3).map(|_| RedisServer::start_sentinel(port)).collect();
        for sentinel in &sentinels {
            sentinel.wait_until("the Sentinels know everybody", &["info", "sentinel"], |said| {
                said.contains(&format!(
                    "status=ok,address=127.0.0.1:{port},slaves={replicas},sentinels=3"
                ))
            });
        }
        Self { servers, sentinels }
    }

    /// The address, for clients. What stands before the Sentinels may be a user.
    pub fn url(&self) -> String {
        let places: Vec<_> =
            self.sentinels.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+sentinel://{}/main", places.join(","))
    }

    /// The port that most Sentinels name.
    pub fn primary_port(&self) -> u16 {
        let command = ["sentinel", "get-master-addr-by-name", "main"];
        let named = |sentinel: &RedisServer| sentinel.cli(&command).lines().nth(1)?.parse().ok();
        let mut ports: Vec<u16> = self.sentinels.iter().filter_map(named).collect();
        ports.sort_unstable();
        ports[ports.len() / 2]
    }

    /// Waits until the Sentinels have agreed on another primary than this one.
    pub fn wait_for_failover_from(&self, port: u16) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.primary_port() == port {
            assert!(Instant::now() < deadline, "the Sentinels elect nobody");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Masters with the slots spread over them, each with replicas.
#[derive(Debug)]
pub struct RedisCluster {
    /// The masters first, then the replicas of the first, and so on.
    pub nodes: Vec<RedisServer>,
    pub masters: usize,
}

impl RedisCluster {
    pub fn start(masters: usize, replicas: usize) -> Self {
        Self::start_with(masters, replicas, RedisServer::start_with)
    }

    pub fn start_with(
        masters: usize,
        replicas: usize,
        start: impl Fn(&[&str]) -> RedisServer,
    ) -> Self {
        let options = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1500",
            "--cluster-replica-validity-factor",
            "0",
            "--cluster-require-full-coverage",
            "no",
        ];
        let nodes: Vec<_> = (0..masters * (1 + replicas)).map(|_| start(&options)).collect();
        let this = Self { nodes, masters };
        let slots = |master| 16_384 * master / masters;
        for (number, node) in this.nodes.iter().enumerate() {
            node.cli(&["cluster", "set-config-epoch", &(number + 1).to_string()]);
            if number < masters {
                let (first, end) = (slots(number), slots(number + 1));
                let last = (end - 1).to_string();
                node.cli(&["cluster", "addslotsrange", &first.to_string(), &last]);
            }
            if number > 0 {
                let port = node.port().to_string();
                this.nodes[0].cli(&["cluster", "meet", "127.0.0.1", &port]);
            }
        }
        let everybody = format!("cluster_known_nodes:{}", this.nodes.len());
        for node in &this.nodes {
            node.wait_until("all nodes have met", &["cluster", "info"], |said| {
                said.contains(&everybody) && said.contains("cluster_slots_assigned:16384")
            });
        }
        for (number, node) in this.nodes.iter().enumerate().skip(masters) {
            let master = this.id((number - masters) / replicas);
            node.cli(&["cluster", "replicate", &master]);
        }
        for master in &this.nodes[..masters] {
            master.wait_for_sync(replicas);
        }
        for node in &this.nodes {
            node.wait_until("the cluster is well", &["cluster", "info"], |said| {
                said.contains("cluster_state:ok")
            });
            node.wait_until("everybody knows the replicas", &["cluster", "nodes"], |said| {
                said.matches("slave").count() == masters * replicas
            });
        }
        this
    }

    pub fn url(&self) -> String {
        let places: Vec<_> = self.nodes[..self.masters]
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.port()))
            .collect();
        format!("redis+cluster://{}", places.join(","))
    }

    /// The id of a node.
    pub fn id(&self, node: usize) -> String {
        self.nodes[node].cli(&["cluster", "myid"])
    }

    /// Begins to move a slot: keys that are there stay, and new ones go to the node that takes it over.
    pub fn open_slot(&self, slot: usize, from: usize, to: usize) {
        let (source_id, target_id) = (self.id(from), self.id(to));
        let slot = slot.to_string();
        self.nodes[to].cli(&["cluster", "setslot", &slot, "importing", &source_id]);
        self.nodes[from].cli(&["cluster", "setslot", &slot, "migrating", &target_id]);
    }

    /// Moves a slot with all its keys, as resharding tools do: some at a time, while clients go on.
    pub fn move_slot(&self, slot: usize, from: usize, to: usize) {
        self.open_slot(slot, from, to);
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let target_id = self.id(to);
        let slot = slot.to_string();
        loop {
            let keys = source.cli(&["cluster", "getkeysinslot", &slot, "20"]);
            if keys.is_empty() {
                break;
            }
            let port = target.port().to_string();
            let mut command = vec!["migrate", "127.0.0.1", &port, "", "0", "5000", "keys"];
            command.extend(keys.lines());
            // A key that has expired meanwhile is not there to be moved.
            let moved = source.cli(&command);
            assert!(["OK", "NOKEY"].contains(&moved.as_str()), "{moved}");
        }
        for node in [target, source] {
            node.cli(&["cluster", "setslot", &slot, "node", &target_id]);
        }
    }

    /// How often the masters have answered with this error.
    pub fn errors(&self, code: &str) -> u64 {
        let start = format!("errorstat_{code}:count=");
        let count = |node: &RedisServer| -> u64 {
            let said = node.cli(&["info", "errorstats"]);
            let line = said.lines().find_map(|line| line.strip_prefix(&start));
            line.map_or(0, |count| count.trim().parse().unwrap())
        };
        self.nodes[..self.masters].iter().map(count).sum()
    }
}

/// The slot of a key's tag: CRC-16/XMODEM.
pub fn slot_of(tag: &str) -> usize {
    let mut crc = 0_u16;
    for byte in tag.bytes() {
        crc ^= u16::from(byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    usize::from(crc) % 16_384
}
