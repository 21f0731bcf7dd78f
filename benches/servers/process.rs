//! The servers' processes: started, pinned, and asked what they used.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

/// A server of this program, gone with its value.
pub(crate) struct Served {
    child: Child,
    pub(crate) port: u16,
    _folder: Option<TempDir>,
}

impl Served {
    /// Starts this program as a server, on one thread and a port of its own.
    pub(crate) fn start(role: &str, redis: &str, store: &str) -> Self {
        Self::start_with(role, redis, store, &[])
    }

    /// The same with more variables.
    pub(crate) fn start_with(
        role: &str,
        redis: &str,
        store: &str,
        variables: &[(&str, &str)],
    ) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .arg(role)
            .env("PORT", "0")
            .env("REDIS_URL", redis)
            .env("STORE", store)
            .env("WORKERS", "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts");
        let mut said = String::new();
        let out = child.stdout.take().expect("it has a standard output");
        BufReader::new(out).read_line(&mut said).expect("it says where it listens");
        let port = said.trim_end().rsplit(':').next().and_then(|port| port.parse().ok());
        let port = port.unwrap_or_else(|| panic!("{role} {store} did not start: {said:?}"));
        pin(child.id(), 0);
        Self { child, port, _folder: None }
    }

    /// Keeps a folder for as long as the server lives.
    pub(crate) fn owning(mut self, folder: TempDir) -> Self {
        self._folder = Some(folder);
        self
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Puts the load, which is this process, on the second core.
pub(crate) fn pin_load() {
    pin(std::process::id(), 1);
}

pub(crate) fn pin_to_load(pid: u32) {
    pin(pid, 1);
}

/// Keeps all threads of a process on one core, where there is `taskset` and a second core.
fn pin(pid: u32, core: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // This process may be pinned itself by now, which is what it then counts.
    static MANY: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    if !*MANY.get_or_init(|| cores > 1) {
        return;
    }
    let _ = Command::new("taskset")
        .args(["-a", "-p", "-c", &core.to_string(), &pid.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// The processor time that a process and its children have used so far, also those that have ended: PostgreSQL
/// has a process for each connection. Nothing where there is no `/proc`.
pub(crate) fn used(pid: u32) -> Duration {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_ascii_whitespace().filter_map(|child| child.parse().ok());
    // Only its own parent's count has a child that has ended.
    let ticks = ticks(pid, 4) + children.map(|child| ticks(child, 2)).sum::<u64>();
    // A hundred ticks a second, on every Linux that is in use.
    Duration::from_millis(ticks * 10)
}

/// The first two of these are its own time, the next two that of children that have ended.
fn ticks(pid: u32, count: usize) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it may have blanks in it.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    fields.skip(11).take(count).filter_map(|field| field.parse::<u64>().ok()).sum()
}
