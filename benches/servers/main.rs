//! Whole servers under load: the layer, next to a floor and to no layer at all.
//!
//! ```text
//! cargo bench --bench servers -- [--rounds N] [--seconds S] [WORKLOAD ...]
//! ```
//!
//! Starts a Redis of its own, the server of `examples/bench_server.rs`, and the floor (`floor.rs`), and
//! measures them in turn, A B, B A, so that whatever else the machine does hits both. What it prints are
//! ratios of the two runs of a pair, as medians over all pairs; absolute numbers of one machine at one hour say
//! little. On Linux servers run on the first core, Redis and the load on the second, if there are two.
//!
//! | workload | what is sent |
//! |---|---|
//! | `W1` | fresh keys, answers of 300 bytes |
//! | `W2` | replays of 10,000 completed keys |
//! | `W3` | four fifths fresh, one fifth replays |
//! | `W4` | storms: all connections send one key at a time, whose handler takes 50 ms; ours wait for its answer, the floor refuses |
//! | `W4-refused` | the same, where ours refuses too (`wait` of zero) |
//! | `W4-paced` | storms as in `W4`, one every 60 ms for both, so that both have the same requests to answer |
//! | `W5`, `W5R` | fresh keys and replays, answers of 64 KiB |
//! | `W1@2000` | fresh keys, 2,000 a second, latency counted from when each was due |
//! | `memory` | the memory store, next to no layer at all |
//! | `pool` | fresh keys, Redis through a deadpool pool |
//! | `sqlite`, `postgres` | one transaction for key, row and answer, next to one written by hand |
//! | `open` | a route without the layer in the same program, next to no layer at all |
//! | `growth` | `W1` with a million keys stored before, next to none |
//! | `bytes` | what a completed key takes in Redis |

mod floor;
mod load;
#[path = "../../tests/support/postgres.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "written for tests, which use the rest"
)]
mod postgres;
mod process;
#[path = "../../tests/support/redis.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "written for tests, which use the rest"
)]
mod redis;
mod report;
#[path = "../../examples/bench_server.rs"]
mod server;

use std::process::ExitCode;
use std::time::Duration;

use load::{Load, Plan};
use postgres::PostgresServer;
use process::Served;
use redis::RedisServer;
use report::{Pair, Report};

/// What is measured if nothing is named.
const ALL: [&str; 16] = [
    "W1",
    "W2",
    "W3",
    "W4",
    "W4-refused",
    "W4-paced",
    "W5",
    "W5R",
    "W1@2000",
    "memory",
    "pool",
    "sqlite",
    "postgres",
    "open",
    "growth",
    "bytes",
];
/// Keys that are replayed.
const REPLAYED: usize = 10_000;
const MILLION: usize = 1_000_000;

struct Options {
    rounds: usize,
    seconds: f64,
    workloads: Vec<String>,
}

impl Options {
    fn read() -> Result<Self, String> {
        let mut options = Self { rounds: 7, seconds: 1.5, workloads: Vec::new() };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut number = |name: &str| {
                let value = arguments.next().ok_or(format!("{name} needs a value"))?;
                value.parse::<f64>().map_err(|_| format!("{name}: {value:?} is no number"))
            };
            match argument.as_str() {
                // cargo says it to every benchmark.
                "--bench" => {}
                "--rounds" => options.rounds = number("--rounds")?.max(1.0) as usize,
                "--seconds" => options.seconds = number("--seconds")?.max(0.1),
                name if ALL.contains(&name) => options.workloads.push(name.to_owned()),
                other => {
                    return Err(format!("{other:?} is no workload; there are {}", ALL.join(", ")));
                }
            }
        }
        if options.workloads.is_empty() {
            options.workloads = ALL.map(str::to_owned).to_vec();
        }
        Ok(options)
    }

    fn window(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

fn main() -> ExitCode {
    // The servers are this program again.
    let served = match std::env::args().nth(1).as_deref() {
        Some("serve-ours") => Some(server::main()),
        Some("serve-floor") => Some(floor::main()),
        _ => None,
    };
    if let Some(served) = served {
        return match served {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let options = match Options::read() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    process::pin_load();
    let redis = RedisServer::start();
    process::pin_to_load(redis.pid());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime for the load");
    let mut report = Report::begin(&options);
    for workload in &options.workloads {
        eprintln!("{workload} ...");
        match workload.as_str() {
            "bytes" => report.bytes(&redis, &runtime),
            "growth" => report.pairs("growth", &growth(&options, &redis, &runtime)),
            name => report.pairs(name, &measure(name, &options, &redis, &runtime)),
        }
    }
    report.end();
    ExitCode::SUCCESS
}

/// Which two servers a workload compares.
fn contestants(workload: &str, redis: &RedisServer) -> (Served, Served, Option<PostgresServer>) {
    let url = redis.url();
    let ours = |store: &str| Served::start("serve-ours", &url, store);
    let floor = |store: &str| Served::start("serve-floor", &url, store);
    match workload {
        "memory" => (ours("memory"), floor("none"), None),
        "open" => (ours("memory"), floor("none"), None),
        "pool" => (ours("pool"), floor(""), None),
        "sqlite" => {
            let folder = tempfile::tempdir().expect("a folder for databases");
            let file = |name| format!("sqlite:{}", folder.path().join(name).display());
            let (ours, floor) = (ours(&file("ours.db")), floor(&file("floor.db")));
            (ours.owning(folder), floor, None)
        }
        "postgres" => {
            let server = PostgresServer::start();
            let url = server.url();
            (ours(&url), floor(&url), Some(server))
        }
        "W4-refused" => {
            (Served::start_with("serve-ours", &url, "", &[("WAIT", "0")]), floor(""), None)
        }
        _ => (ours(""), floor(""), None),
    }
}

fn measure(
    workload: &str,
    options: &Options,
    redis: &RedisServer,
    runtime: &tokio::runtime::Runtime,
) -> Vec<Pair> {
    let (ours, floor, database) = contestants(workload, redis);
    // What the server keeps its records in, if that is a process of its own.
    let store = database.as_ref().map_or(redis.pid(), PostgresServer::pid);
    let plan = Plan::of(workload, options.window());
    let run = |served: &Served, round: usize| {
        redis.cli(&["flushall", "sync"]);
        let load = Load { port: served.port, plan, round };
        let watched = [served.pid(), store];
        runtime.block_on(load.run(watched))
    };
    // Once unmeasured: caches, connections, the first pages.
    let _ = (run(&ours, options.rounds), run(&floor, options.rounds));
    let paired = |round: usize| {
        if round.is_multiple_of(2) {
            let ours = run(&ours, round);
            Pair { ours, floor: run(&floor, round) }
        } else {
            let floor = run(&floor, round);
            Pair { ours: run(&ours, round), floor }
        }
    };
    (0..options.rounds).map(paired).collect()
}

/// The layer with a million stored keys, next to itself with none.
fn growth(options: &Options, empty: &RedisServer, runtime: &tokio::runtime::Runtime) -> Vec<Pair> {
    let full = RedisServer::start();
    process::pin_to_load(full.pid());
    let fill = "for i = 1, ARGV[1] do \
                redis.call('SET', 'idem:{' .. string.rep('k', 20) .. i .. '}', string.rep('v', 430), 'PX', 86400000) \
                end return redis.call('DBSIZE')";
    full.cli(&["eval", fill, "0", &MILLION.to_string()]);
    let start = |redis: &RedisServer| Served::start("serve-ours", &redis.url(), "");
    let (grown, fresh) = (start(&full), start(empty));
    let plan = Plan::of("W1", options.window());
    let run = |served: &Served, redis: &RedisServer, round: usize| {
        let load = Load { port: served.port, plan, round };
        runtime.block_on(load.run([served.pid(), redis.pid()]))
    };
    (0..options.rounds)
        .map(|round| {
            empty.cli(&["flushall", "sync"]);
            if round.is_multiple_of(2) {
                let ours = run(&grown, &full, round);
                Pair { ours, floor: run(&fresh, empty, round) }
            } else {
                let floor = run(&fresh, empty, round);
                Pair { ours: run(&grown, &full, round), floor }
            }
        })
        .collect()
}
