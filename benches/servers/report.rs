//! What is printed: medians of the ratios of pairs.

use std::fmt::Write as _;
use std::time::Duration;

use crate::Options;
use crate::load::{Load, Plan, Ran};
use crate::process::Served;
use crate::redis::RedisServer;

/// Two runs, one right after the other.
pub(crate) struct Pair {
    pub(crate) ours: Ran,
    pub(crate) floor: Ran,
}

pub(crate) struct Report {
    text: String,
}

const HEAD: &str = "\
| workload | both | server | store | throughput | p50 | p99 | µs a request, ours and floor | runs per key, ours and floor | answers of ours |
|---|---|---|---|---|---|---|---|---|---|
";

/// Keys that are stored to see what one takes.
const STORED: usize = 100_000;

impl Report {
    pub(crate) fn begin(options: &Options) -> Self {
        eprintln!("{} pairs of {} s each", options.rounds, options.seconds);
        Self { text: HEAD.to_owned() }
    }

    pub(crate) fn pairs(&mut self, workload: &str, pairs: &[Pair]) {
        let ratio = |of: &dyn Fn(&Ran) -> f64| {
            let each = pairs.iter().map(|pair| of(&pair.ours) / of(&pair.floor));
            median(each.filter(|ratio| ratio.is_finite()).collect())
        };
        let micros = |used: Duration, ran: &Ran| used.as_secs_f64() * 1e6 / ran.requests as f64;
        let both = |ran: &Ran| micros(ran.used[0] + ran.used[1], ran);
        let median_of = |of: &dyn Fn(&Pair) -> f64| median(pairs.iter().map(of).collect());
        let latency = |part| move |ran: &Ran| ran.percentile(part).as_secs_f64();
        let _ = writeln!(
            self.text,
            "| {workload} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1}, {:.1} | {:.3}, {:.3} | {} |",
            ratio(&both),
            ratio(&|ran| micros(ran.used[0], ran)),
            ratio(&|ran| micros(ran.used[1], ran)),
            ratio(&Ran::per_second),
            ratio(&latency(0.5)),
            ratio(&latency(0.99)),
            median_of(&|pair| both(&pair.ours)),
            median_of(&|pair| both(&pair.floor)),
            median_of(&|pair| pair.ours.runs_per_key),
            median_of(&|pair| pair.floor.runs_per_key),
            pairs.last().map(|pair| pair.ours.statuses()).unwrap_or_default(),
        );
    }

    /// What a completed key takes in Redis, ours and of the floor.
    pub(crate) fn bytes(&mut self, redis: &RedisServer, runtime: &tokio::runtime::Runtime) {
        let of = |role: &str| {
            let served = Served::start(role, &redis.url(), "");
            let load = Load { port: served.port, plan: Plan::fresh(Duration::MAX), round: 0 };
            redis.cli(&["flushall", "sync"]);
            let before = used_memory(redis);
            runtime.block_on(load.fill(STORED));
            let stored: f64 = redis.cli(&["dbsize"]).parse().expect("a number of keys");
            (used_memory(redis) - before) / stored
        };
        let (ours, floor) = (of("serve-ours"), of("serve-floor"));
        let _ = writeln!(
            self.text,
            "| bytes of a key | {:.2} | | | | | | {ours:.0}, {floor:.0} (bytes) | | |",
            ours / floor
        );
    }

    pub(crate) fn end(&self) {
        println!("{}", self.text);
    }
}

fn used_memory(redis: &RedisServer) -> f64 {
    let said = redis.cli(&["info", "memory"]);
    let used = said.lines().find_map(|line| line.strip_prefix("used_memory:"));
    used.and_then(|used| used.trim().parse().ok()).expect("Redis says what it uses")
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}
