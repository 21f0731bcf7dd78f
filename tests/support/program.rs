//! The program `idempotency` as tests run it, and records for it to look after.

#![allow(dead_code, reason = "not every test needs all of it")]

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use tower_idempotency::record::{
    Claim, ClaimOutcome, Completion, Effects, OnExpired, Release, Terms, Verdict, Writes,
};
use tower_idempotency::{
    Fingerprint, Fingerprints, HeaderRules, HolderId, IdempotencyKey, Identity, Lease, RecipeId,
    StorageKey, Store, StoredResponse,
};

pub(crate) const TERMS: Terms = Terms {
    lease: Duration::from_secs(600),
    retention: Duration::from_secs(600),
    unknown_retention: Duration::from_secs(600),
};

/// What a run of the program came to.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) errors: String,
    pub(crate) took: Duration,
}

/// The program with a store.
pub(crate) struct Cli {
    pub(crate) store: String,
}

impl Cli {
    pub(crate) fn new(store: impl Into<String>) -> Self {
        Self { store: store.into() }
    }

    pub(crate) fn command(&self) -> Command {
        self.environment(Command::new(env!("CARGO_BIN_EXE_idempotency")))
    }

    pub(crate) fn environment(&self, mut command: Command) -> Command {
        // A developer's own settings are not part of a test.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("IDEMPOTENCY_")) {
            command.env_remove(name);
        }
        command.env_remove("NO_COLOR").env("IDEMPOTENCY_STORE", &self.store);
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, "")
    }

    pub(crate) fn run_with(&self, args: &[&str], input: &str) -> Ran {
        let begun = Instant::now();
        let mut command = self.command();
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        Ran {
            code: output.status.code().unwrap(),
            out: String::from_utf8(output.stdout).unwrap(),
            errors: String::from_utf8(output.stderr).unwrap(),
            took: begun.elapsed(),
        }
    }

    /// Runs it on a terminal and gives everything that the terminal was sent.
    pub(crate) fn on_terminal(
        &self,
        args: &[&str],
        input: &str,
        environment: &[(&str, &str)],
    ) -> (i32, String) {
        const PTY: &str = "import os, pty, sys\n\
            data = []\n\
            def read(fd):\n\
            \x20   chunk = os.read(fd, 65536)\n\
            \x20   data.append(chunk)\n\
            \x20   return chunk\n\
            code = os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], read))\n\
            sys.exit(code)\n";
        let mut command = self.environment(Command::new("python3"));
        command.args(["-c", PTY, env!("CARGO_BIN_EXE_idempotency")]).args(args);
        command.env("TERM", "xterm").envs(environment.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).unwrap();
        // Kept open: its end would close the terminal.
        std::thread::sleep(Duration::from_millis(300));
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().unwrap(), text)
    }
}

impl Ran {
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn failed(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.errors.contains("error"), "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

pub(crate) fn key(name: &str) -> StorageKey {
    StorageKey::new(&Identity::from("acme"), &IdempotencyKey::new(name).unwrap())
}

pub(crate) fn print() -> Fingerprint {
    Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [7; 32])
}

pub(crate) async fn claimed(store: &dyn Store, name: &str) -> Lease {
    claimed_for(store, name, TERMS).await
}

pub(crate) async fn claimed_for(store: &dyn Store, name: &str, terms: Terms) -> Lease {
    let claim = Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print()),
        terms,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    };
    match store.claim(key(name), &claim).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn unknown(store: &dyn Store, name: &str) {
    let lease = claimed(store, name).await;
    store.release(&lease, &Release { terms: TERMS, verdict: Verdict::Unknown }).await.unwrap();
}

pub(crate) async fn completed(store: &dyn Store, name: &str, body: &'static str) {
    let lease = claimed(store, name).await;
    let (head, ()) = http::Response::builder()
        .status(201)
        .header("x-note", "kept")
        .body(())
        .unwrap()
        .into_parts();
    let response = StoredResponse::new(&head, Bytes::from(body), &HeaderRules::default()).encode();
    let completion = Completion { terms: TERMS, response, writes: Writes::Keep };
    store.complete(&lease, &completion).await.unwrap();
}
