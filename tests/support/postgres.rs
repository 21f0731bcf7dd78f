//! A real PostgreSQL of one's own: on a free port, in a folder of its own, gone with the test.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a server may take until it answers; it takes some tenths of a second.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Above those of the Redis servers that other tests start, below those of outgoing connections.
const PORTS: std::ops::Range<u16> = 15_000..19_900;

/// A running server.
#[derive(Debug)]
pub struct PostgresServer {
    child: Child,
    port: u16,
    folder: TempDir,
    options: Vec<String>,
}

impl PostgresServer {
    /// Starts a server with an empty database.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with further settings, each as `name=value`.
    pub fn start_with(settings: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("pg").tempdir().expect("a folder");
        give_away(folder.path());
        let data = folder.path().join("data");
        let made = as_owner("initdb")
            .args(["--no-sync", "--auth=trust", "--username=test", "--encoding=UTF8"])
            .arg("--locale=C")
            .arg("--pgdata")
            .arg(&data)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| missing("initdb", &error));
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let options: Vec<_> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let port = free_port();
        let child = launch(port, folder.path(), &options);
        let mut server = Self { child, port, folder, options };
        if server.wait_until_ready() {
            return server;
        }
        // Between the look at the port and the start somebody else may have taken it.
        let log = std::fs::read_to_string(server.folder.path().join("log")).unwrap_or_default();
        assert!(log.contains("in use"), "postgres does not start; it said: {log}");
        Self::start_with(settings)
    }

    /// A standby of this server, which it reaches through a relay on this port.
    pub fn standby_through(&self, relay: u16) -> Self {
        let folder = tempfile::Builder::new().prefix("pg").tempdir().expect("a folder");
        give_away(folder.path());
        let copied = as_owner("pg_basebackup")
            .args(["-h", "127.0.0.1", "-U", "test", "-R", "--no-sync", "--checkpoint=fast"])
            .args(["-p", &relay.to_string()])
            .arg("-D")
            .arg(folder.path().join("data"))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| missing("pg_basebackup", &error));
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let port = free_port();
        let child = launch(port, folder.path(), &[]);
        let mut server = Self { child, port, folder, options: Vec::new() };
        assert!(server.wait_until_ready(), "the standby starts");
        server
    }

    /// A server that tests running at the same time share, and a database of one's own on it.
    pub fn shared() -> (Arc<Self>, String) {
        static SHARED: Mutex<Weak<PostgresServer>> = Mutex::new(Weak::new());
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let server = {
            let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
            shared.upgrade().unwrap_or_else(|| {
                let server = Arc::new(Self::start());
                *shared = Arc::downgrade(&server);
                server
            })
        };
        let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        server.psql(&format!("CREATE DATABASE {name}"));
        let url = server.url().replace("/postgres?", &format!("/{name}?"));
        (server, url)
    }

    /// Runs one statement and gives what it printed.
    #[track_caller]
    pub fn psql(&self, sql: &str) -> String {
        self.psql_in("postgres", sql)
    }

    /// The same in another database.
    #[track_caller]
    pub fn psql_in(&self, database: &str, sql: &str) -> String {
        let url = self.url().replace("/postgres?", &format!("/{database}?"));
        let output = Command::new(program("psql"))
            .args(["-X", "-q", "-t", "-A", "-d", &url, "-c", sql])
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| missing("psql", &error));
        assert!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// The address, for clients.
    pub fn url(&self) -> String {
        self.url_through(self.port)
    }

    /// The address through a relay that listens on this port.
    pub fn url_through(&self, port: u16) -> String {
        format!("postgres://test@127.0.0.1:{port}/postgres?sslmode=disable")
    }

    /// The port.
    /// Of the process whose children serve the connections.
    pub fn pid(&self) -> u32 {
        let pid = std::fs::read_to_string(self.folder.path().join("data/postmaster.pid"));
        let pid = pid.unwrap_or_default().lines().next().and_then(|pid| pid.trim().parse().ok());
        pid.expect("a running server has written its number down")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of its data.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Ends the server as a power cut would: no checkpoint, every connection gone.
    pub fn stop_at_once(&mut self) {
        self.signal("QUIT");
        self.child.wait().expect("the server ends");
    }

    /// Starts it again on the same data and port.
    pub fn restart(&mut self) {
        self.child = launch(self.port, self.folder.path(), &self.options);
        assert!(self.wait_until_ready(), "the server starts again");
    }

    /// Freezes the server and all its backends: connections stay open, and nothing answers.
    pub fn freeze(&self) {
        self.signal_all("STOP");
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal_all("CONT");
    }

    fn signal_all(&self, name: &str) {
        self.signal(name);
        let pid = self.child.id().to_string();
        let sent = Command::new("pkill").args([&format!("-{name}"), "-P", &pid]).status();
        assert!(sent.is_ok(), "pkill runs");
    }

    fn signal(&self, name: &str) {
        let pid = self.folder.path().join("data/postmaster.pid");
        let Ok(pid) = std::fs::read_to_string(pid) else { return };
        let pid = pid.lines().next().unwrap_or_default().to_owned();
        let _ = Command::new("kill").args([&format!("-{name}"), &pid]).status();
    }

    /// Waits until the server answers, and is the one that was started.
    fn wait_until_ready(&mut self) -> bool {
        let deadline = Instant::now() + START_LIMIT;
        let port = self.port.to_string();
        while Instant::now() < deadline {
            if self.child.try_wait().expect("the server can be looked at").is_some() {
                return false;
            }
            let ready = Command::new(program("pg_isready"))
                .args(["-q", "-h", "127.0.0.1", "-p", &port, "-d", "postgres", "-U", "test"])
                .stdin(Stdio::null())
                .status()
                .unwrap_or_else(|error| missing("pg_isready", &error));
            if ready.success() {
                return true;
            }
            sleep(Duration::from_millis(20));
        }
        false
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // The postmaster takes its children with it when it is told to; killed, it would not.
        self.signal("QUIT");
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(port: u16, folder: &Path, options: &[String]) -> Child {
    let log = File::create(folder.join("log")).expect("a log file");
    let errors = log.try_clone().expect("a log file");
    let mut command = as_owner("postgres");
    command.arg("-D").arg(folder.join("data")).args(["-p", &port.to_string()]);
    command.arg("-k").arg(folder).args(["-h", "127.0.0.1"]);
    let settings = ["fsync=off", "max_connections=60", "deadlock_timeout=200ms"];
    for setting in settings.iter().copied().chain(options.iter().map(String::as_str)) {
        command.args(["-c", setting]);
    }
    command
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .unwrap_or_else(|error| missing("postgres", &error))
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().expect("id runs");
    String::from_utf8_lossy(&id.stdout).trim() == "0"
}

/// PostgreSQL refuses to run as root: then the files belong to the user that its package made.
fn give_away(folder: &Path) {
    if is_root() {
        let given = Command::new("chown").arg("postgres").arg(folder).status();
        assert!(
            given.is_ok_and(|status| status.success()),
            "no user `postgres`: `tests/run` installs what these tests need"
        );
    }
}

fn as_owner(name: &str) -> Command {
    if is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]);
        command.arg(program(name));
        command
    } else {
        Command::new(program(name))
    }
}

/// Debian keeps the server's programs out of `PATH`.
fn program(name: &str) -> PathBuf {
    let mut versions: Vec<_> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin").join(name))
        .filter(|program| program.exists())
        .collect();
    versions.sort();
    versions.pop().unwrap_or_else(|| name.into())
}

fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let width = PORTS.end - PORTS.start;
    // Test programs run side by side: each begins somewhere else.
    let offset = u16::try_from(std::process::id() % u32::from(width)).unwrap_or_default();
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + offset.wrapping_add(step.wrapping_mul(7)) % width;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn missing(program: &str, error: &std::io::Error) -> ! {
    panic!(
        "{program} cannot be run ({error}). These tests need a real PostgreSQL: `tests/run` says how \
         to get one, and runs everything."
    )
}
