//! Starts the payments sandbox as a process of its own and speaks HTTP to it, as its users do.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Nothing in these tests takes longer, except when it hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running sandbox with a ledger of its own, killed when dropped.
pub(crate) struct Sandbox {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) ledger: PathBuf,
    output: Arc<Mutex<String>>,
    errors: Arc<Mutex<String>>,
    hung_up: Arc<AtomicBool>,
    directory: Option<tempfile::TempDir>,
}

/// The built example. Builds it first, since cargo does not always do that before it runs tests,
/// and an old one would answer for code that is gone.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| built("payments"))
}

pub(crate) fn built(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/test");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--example", example, "--manifest-path"]);
    build.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"));
    build.arg("--target-dir").arg(profile.parent().expect("target"));
    // Cargo tells a test which package it is of. Dependencies whose build looks at that would be built
    // anew, and all that depends on them, by each cargo that is started with another word on it.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            build.env_remove(&name);
        }
    }
    // The same features as this test was built with, so that there is nothing to do most of the time.
    let with = [
        ("mistakes", cfg!(feature = "mistakes")),
        ("conformance", cfg!(feature = "conformance")),
        ("admin", cfg!(feature = "admin")),
        ("cli", cfg!(feature = "cli")),
        ("client-reqwest", cfg!(feature = "client-reqwest")),
        ("protect", cfg!(feature = "protect")),
    ];
    for (feature, _) in with.iter().filter(|(_, on)| *on) {
        build.args(["--features", feature]);
    }
    if profile.ends_with("release") {
        build.arg("--release");
    }
    let built = build.stdin(Stdio::null()).status().expect("cargo can be started");
    assert!(built.success(), "the example does not build");
    profile.join("examples").join(example)
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    // A developer's own settings are not part of a test.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PAYMENTS_")) {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What says on standard error when a handler runs.
fn telling_runs(ledger: Option<&Path>, args: &[&str]) -> Command {
    let mut command = command(args);
    command.env("RUST_LOG", "warn,payments::runs=debug");
    if let Some(ledger) = ledger {
        command.arg("--ledger").arg(ledger);
    }
    command
}

/// Starts the sandbox where it must refuse to: its exit code and what it said.
pub(crate) fn refused(args: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut command = command(args);
    command.current_dir(&directory).envs(environment.iter().copied());
    let mut child = command.spawn().expect("the sandbox can be started");
    let status = wait_for(&mut child).expect("it refuses instead of running");
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("UTF-8");
    (status.code(), said)
}

fn wait_for(child: &mut Child) -> Option<ExitStatus> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    None
}

/// Collects what a child says, so that it never blocks on a full pipe; and whether that was all.
fn collect(stream: impl std::io::Read + Send + 'static) -> (Arc<Mutex<String>>, Arc<AtomicBool>) {
    let text = Arc::new(Mutex::new(String::new()));
    let hung_up = Arc::new(AtomicBool::new(false));
    let (shared, end) = (Arc::clone(&text), Arc::clone(&hung_up));
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut text = shared.lock().expect("no holder panics");
            text.push_str(&line);
            text.push('\n');
        }
        end.store(true, Ordering::SeqCst);
    });
    (text, hung_up)
}

fn read(text: &Mutex<String>) -> String {
    text.lock().expect("no holder panics").clone()
}

impl Sandbox {
    /// Starts with a new ledger.
    pub(crate) fn start(args: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut sandbox = Self::start_on(&directory.path().join("ledger.db"), args);
        sandbox.directory = Some(directory);
        sandbox
    }

    /// Starts with the store that the arguments name; an SQL store holds the ledger too.
    pub(crate) fn start_with_store(args: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut command = command(args);
        command.current_dir(&directory);
        let mut sandbox = Self::spawn(command, &directory.path().join("payments.db"));
        sandbox.directory = Some(directory);
        sandbox
    }

    /// Starts with a new ledger, and with a variable in its environment.
    pub(crate) fn start_knowing(name: &str, value: &str, args: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let ledger = directory.path().join("ledger.db");
        let mut command = command(args);
        command.arg("--ledger").arg(&ledger).env(name, value);
        let mut sandbox = Self::spawn(command, &ledger);
        sandbox.directory = Some(directory);
        sandbox
    }

    /// Starts with this ledger.
    pub(crate) fn start_on(ledger: &Path, args: &[&str]) -> Self {
        let mut command = command(args);
        command.arg("--ledger").arg(ledger);
        Self::spawn(command, ledger)
    }

    /// Starts with this ledger, or with the store's own, and says on standard error when a handler runs.
    pub(crate) fn start_telling_runs(ledger: Option<&Path>, args: &[&str]) -> Self {
        Self::try_telling_runs(ledger, args).unwrap_or_else(|said| panic!("no start: {said}"))
    }

    /// The same where it may refuse to start: what it said then.
    pub(crate) fn try_telling_runs(ledger: Option<&Path>, args: &[&str]) -> Result<Self, String> {
        Self::try_spawn(telling_runs(ledger, args), ledger.unwrap_or(Path::new("")))
    }

    /// The same with variables in its environment.
    pub(crate) fn start_telling_runs_knowing(
        ledger: &Path,
        environment: &[(&str, &str)],
        args: &[&str],
    ) -> Self {
        let mut command = telling_runs(Some(ledger), args);
        command.envs(environment.iter().copied());
        Self::spawn(command, ledger)
    }

    /// Starts another example that has the sandbox's routes and tells when a handler runs.
    pub(crate) fn start_example(name: &str, ledger: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(built(name));
        command
            .args(args)
            .arg("--ledger")
            .arg(ledger)
            .env("RUST_LOG", format!("warn,{name}=debug"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::spawn(command, ledger)
    }

    fn spawn(command: Command, ledger: &Path) -> Self {
        Self::try_spawn(command, ledger).unwrap_or_else(|said| panic!("no start: {said}"))
    }

    fn try_spawn(mut command: Command, ledger: &Path) -> Result<Self, String> {
        command.args(["--listen", "127.0.0.1:0"]);
        let mut child = command.spawn().expect("the sandbox can be started");
        let (output, _) = collect(child.stdout.take().expect("piped"));
        let (errors, hung_up) = collect(child.stderr.take().expect("piped"));
        let end = Instant::now() + PATIENCE;
        let address = loop {
            if let Some(first) = read(&output).lines().next() {
                let address = first.strip_prefix("listening on http://");
                break address.and_then(|address| address.parse().ok()).expect("the first line");
            }
            let ended = child.try_wait().expect("a child can be waited for");
            if ended.is_some() || Instant::now() >= end {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{ended:?} {}", read(&errors)));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let ledger = ledger.to_owned();
        Ok(Self { child, address, ledger, output, errors, hung_up, directory: None })
    }

    /// Starts on the ledger of one that has ended.
    pub(crate) fn start_again(mut ended: Self, args: &[&str]) -> Self {
        let mut sandbox = Self::start_on(&ended.ledger, args);
        sandbox.directory = ended.directory.take();
        sandbox
    }

    /// What it has written to standard output and standard error so far.
    pub(crate) fn said(&self) -> (String, String) {
        (read(&self.output), read(&self.errors))
    }

    /// True once it has ended and nothing of what it has written is missing.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.hung_up.load(Ordering::SeqCst)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, `TERM` for example.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "cannot send SIG{name}");
    }

    /// Waits until it has ended.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        wait_for(&mut self.child).expect("it ends")
    }

    /// Opens a connection that several requests can be sent on.
    pub(crate) async fn connect(&self) -> Connection {
        Connection::open(self.address).await.expect("it accepts connections")
    }

    /// Sends one request on a connection of its own.
    pub(crate) async fn send(&self, request: Call) -> Answer {
        self.connect().await.send(request).await.expect("an answer")
    }

    /// How many charges really happened.
    pub(crate) async fn charges(&self) -> u64 {
        self.ledger().await["charges"].as_u64().expect("a number")
    }

    /// The whole ledger.
    pub(crate) async fn ledger(&self) -> Value {
        self.send(Call::get("/v1/ledger")).await.json()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One HTTP/1.1 connection.
pub(crate) struct Connection(hyper::client::conn::http1::SendRequest<Full<Bytes>>);

impl Connection {
    /// Connects, if somebody listens there.
    pub(crate) async fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        let shake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = shake.map_err(std::io::Error::other)?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    /// Sends a request; fails if the connection ends before the answer does.
    pub(crate) async fn send(&mut self, call: Call) -> hyper::Result<Answer> {
        self.0.ready().await?;
        let response = self.0.send_request(call.into_request());
        let answered = async { Answer::read(response.await?).await };
        tokio::time::timeout(PATIENCE, answered).await.expect("an answer, or the end")
    }
}

/// Sends one request over HTTP/2 with prior knowledge.
pub(crate) async fn send_http2(address: SocketAddr, call: Call) -> Answer {
    let stream = TcpStream::connect(address).await.expect("it accepts connections");
    let io = TokioIo::new(stream);
    let shake = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
    let (mut sender, connection) = shake.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    let mut request = call.into_request();
    *request.uri_mut() = format!("http://{address}{}", request.uri()).parse().expect("a URI");
    let response = sender.send_request(request).await.expect("an answer");
    assert_eq!(response.version(), http::Version::HTTP_2);
    Answer::read(response).await.expect("a body")
}

/// A request to be sent.
#[derive(Clone)]
pub(crate) struct Call {
    method: Method,
    path: String,
    headers: Vec<(String, String)>,
    body: Bytes,
}

impl Call {
    pub(crate) fn new(method: Method, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), headers: Vec::new(), body: Bytes::new() }
    }

    /// By `acme`, as every call is that does not say otherwise.
    pub(crate) fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path).account("acme")
    }

    /// A payment of 19.99 from this source.
    pub(crate) fn pay(key: &str, source: &str) -> Self {
        Self::pay_amount(key, source, 1999)
    }

    pub(crate) fn pay_amount(key: &str, source: &str, amount: u32) -> Self {
        let body = json!({ "amount": amount, "currency": "usd", "source": source });
        Self::new(Method::POST, "/v1/payments").account("acme").key(key).json(body.to_string())
    }

    pub(crate) fn account(self, account: &str) -> Self {
        self.header("authorization", &format!("Bearer sk_test_{account}"))
    }

    pub(crate) fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    /// Sets a header; replaces what was there.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self = self.without(name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(present, _)| present != name);
        self
    }

    pub(crate) fn json(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self.header("content-type", "application/json")
    }

    pub(crate) fn form(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self.header("content-type", "application/x-www-form-urlencoded")
    }

    fn into_request(self) -> Request<Full<Bytes>> {
        let mut request = Request::builder().method(self.method).uri(self.path);
        request = request.header("host", "sandbox.test");
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        request.body(Full::new(self.body)).expect("a request that can be sent")
    }
}

/// What came back.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    async fn read(response: http::Response<hyper::body::Incoming>) -> hyper::Result<Self> {
        let (head, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Self { status: head.status, headers: head.headers, body })
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("ASCII"))
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The `code` of a problem document, or of the sandbox's own error.
    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn is_problem(&self) -> bool {
        let body = self.json();
        self.header("content-type") == Some("application/problem+json")
            && body["status"] == self.status.as_u16()
            && body["code"] == body["error"]["code"]
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    /// The payment's id.
    pub(crate) fn id(&self) -> String {
        self.json()["id"].as_str().expect("an id").to_owned()
    }
}
