//! Where the boundary of the transaction lies decides what a crash costs: `cargo run --example crash_lab`.
//!
//! A payment is made in six ways, and its server is killed at four moments of each: after the claim,
//! after the effect, after the commit of the answer, and never, but the answer gets lost. Each time the
//! client sends the same request again until it is told something final. What to see in the table:
//! *effects* is 1 in every line where effect and key share a transaction; wherever they do not, some
//! line has 0 or 2, or the client is told that nobody knows.
//!
//! Every attempt runs in a process of its own, which really dies. The rows with Redis need
//! `redis-server`; without it they are left out.

use std::error::Error;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::Duration;

mod worker;

use worker::{Cut, Scheme};

/// What a client is told in the end.
struct Told {
    status: String,
    code: String,
}

/// A key in use is asked for again: longer than a lease of the lab lasts.
const TRIES: usize = 100;
const PAUSE: Duration = Duration::from_millis(20);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => laboratory(),
        ["attempt", scheme, cut, folder, redis] => {
            worker::attempt(scheme, cut, folder, redis).map_err(|error| error as _)
        }
        _ => Err("it takes no arguments".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn laboratory() -> Result<(), Box<dyn Error>> {
    let redis = Redis::start();
    let heads = ["boundary", "cut", "attempts", "effects", "the client is told", "verdict"];
    line(&heads.map(str::to_owned));
    println!("|{}", "---|".repeat(heads.len()));
    for scheme in Scheme::ALL {
        let address = match (scheme.needs_redis(), &redis) {
            (true, None) => continue,
            (_, redis) => redis.as_ref().map_or_else(String::new, Redis::url),
        };
        for cut in Cut::ALL {
            let folder = tempfile::tempdir()?;
            let told = client(scheme, cut, folder.path(), &address)?;
            let (attempts, effects) = worker::count(folder.path())?;
            line(&[
                scheme.words().to_owned(),
                cut.words().to_owned(),
                attempts.to_string(),
                effects.to_string(),
                format!("{} {}", told.status, told.code),
                verdict(effects, &told).to_owned(),
            ]);
        }
    }
    if redis.is_none() {
        println!("\nredis-server is not here, so its rows are left out.");
    }
    Ok(())
}

fn line(columns: &[String; 6]) {
    println!("| {} |", columns.join(" | "));
}

/// What the line means for whoever pays.
fn verdict(effects: i64, told: &Told) -> &'static str {
    match (effects, told.code.as_str()) {
        (2.., _) => "PAID TWICE",
        (0, "paid") => "PAID, IT SAYS, AND NOTHING HAPPENED",
        (1, "paid") => "right",
        (_, "idempotency_outcome_unknown") => "nobody knows, and it says so",
        _ => "?",
    }
}

/// Sends one request; its first server dies at the cut. Then again until the answer is final.
fn client(scheme: Scheme, cut: Cut, folder: &Path, redis: &str) -> Result<Told, Box<dyn Error>> {
    let first = send(scheme, cut.name(), folder, redis)?;
    // However it ended: this client has not heard of it.
    drop(first);
    for _ in 0..TRIES {
        match send(scheme, "none", folder, redis)? {
            Some(told) if told.code != "idempotency_key_in_use" => return Ok(told),
            Some(_) | None => sleep(PAUSE),
        }
    }
    Err("no final answer".into())
}

/// One attempt in a process of its own; nothing if it died.
fn send(
    scheme: Scheme,
    cut: &str,
    folder: &Path,
    redis: &str,
) -> Result<Option<Told>, Box<dyn Error>> {
    let output = Command::new(std::env::current_exe()?)
        .args(["attempt", scheme.name(), cut])
        .arg(folder)
        .arg(redis)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let mut words = said.split_whitespace().map(str::to_owned);
    Ok(words.next().zip(words.next()).map(|(status, code)| Told { status, code }))
}

/// A Redis of the lab's own.
struct Redis {
    server: Child,
    port: u16,
}

impl Redis {
    fn start() -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?.port();
        let server = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let redis = Self { server, port };
        // A hundredth of this is enough.
        for _ in 0..200 {
            if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(redis);
            }
            sleep(PAUSE);
        }
        None
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
