//! Stripe's official clients as child processes: calls go in as lines of JSON, results come back.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;

use super::tools;

/// No call takes longer, with all of its retries, except when it hangs.
const PATIENCE: Duration = Duration::from_secs(90);

/// Whose client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Language {
    Python,
    Node,
}

impl Language {
    pub const ALL: [Self; 2] = [Self::Python, Self::Node];

    /// The name of an error class, which Node starts with `Stripe`.
    pub fn class(self, name: &str) -> String {
        match self {
            Self::Python => name.to_owned(),
            Self::Node => format!("Stripe{}", name.trim_start_matches("Stripe")),
        }
    }

    /// The class of an error in the connection.
    pub fn connection_error(self) -> &'static str {
        match self {
            Self::Python => "APIConnectionError",
            Self::Node => "StripeConnectionError",
        }
    }
}

type Pending = Arc<Mutex<HashMap<u64, oneshot::Sender<Value>>>>;

/// A running client.
pub struct Sdk {
    pub language: Language,
    pending: Pending,
    stdin: tokio::sync::Mutex<ChildStdin>,
    next: AtomicU64,
    _child: Child,
}

/// What became of a call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The object, and what the client tells of the answer.
    Object(Value),
    /// An error of one of the client's own classes.
    Error(Value),
}

impl Outcome {
    #[track_caller]
    pub fn object(&self) -> &Value {
        match self {
            Self::Object(answer) => &answer["object"],
            Self::Error(error) => panic!("an object was expected: {error}"),
        }
    }

    /// What the client tells of the answer beside the object: `key`, `replayed`, `status`.
    #[track_caller]
    pub fn told(&self, name: &str) -> Option<&str> {
        match self {
            Self::Object(answer) => answer[name].as_str(),
            Self::Error(error) => panic!("an object was expected: {error}"),
        }
    }

    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Object(answer) if answer["replayed"] == "true")
    }

    #[track_caller]
    pub fn error(&self) -> &Value {
        match self {
            Self::Error(error) => error,
            Self::Object(answer) => panic!("an error was expected: {answer}"),
        }
    }

    #[track_caller]
    pub fn class(&self) -> &str {
        self.error()["class"].as_str().expect("a class has a name")
    }
}

impl Sdk {
    /// Starts a client of this server, with twenty seconds of patience.
    pub fn start(language: Language, url: &str) -> Self {
        Self::start_with(language, url, Duration::from_secs(20))
    }

    /// Starts a client that waits this long for each answer.
    pub fn start_with(language: Language, url: &str, timeout: Duration) -> Self {
        let mut command = match language {
            Language::Python => {
                let mut python = Command::new(tools::python());
                python.arg(tools::file("sdk/drive.py"));
                python
            }
            Language::Node => {
                let mut node = Command::new("node");
                node.arg(tools::file("sdk/drive.mjs"));
                node.env("SDK_MODULES", tools::node_packages());
                node
            }
        };
        command.arg(url).arg(timeout.as_secs_f64().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the client can be started; see tests/run");
        let stdin = child.stdin.take().expect("piped");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let pending = Pending::default();
        let waiting = Arc::clone(&pending);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let answer: Value = serde_json::from_str(&line).expect("a line of JSON");
                let id = answer["id"].as_u64().expect("every answer has the id of its call");
                let waiting = waiting.lock().expect("no holder panics").remove(&id);
                drop(waiting.expect("an answer belongs to a call").send(answer));
            }
        });
        let (stdin, next) = (tokio::sync::Mutex::new(stdin), AtomicU64::new(0));
        Self { language, pending, stdin, next, _child: child }
    }

    /// Makes one call.
    ///
    /// # Panics
    /// If it ends neither with an object nor with one of the client's own errors.
    pub async fn call(&self, action: &str, params: Value, options: Value) -> Outcome {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let line = json!({ "id": id, "do": action, "params": params, "options": options });
        let (sender, answer) = oneshot::channel();
        self.pending.lock().expect("no holder panics").insert(id, sender);
        {
            let mut stdin = self.stdin.lock().await;
            stdin.write_all(format!("{line}\n").as_bytes()).await.expect("the client listens");
        }
        let answer = tokio::time::timeout(PATIENCE, answer).await.expect("a call ends");
        let mut answer = answer.expect("the client answers every call");
        if !answer["ok"].is_null() {
            Outcome::Object(answer["ok"].take())
        } else if !answer["error"].is_null() {
            Outcome::Error(answer["error"].take())
        } else {
            panic!("{:?}: {action} ended in an untyped error: {answer}", self.language)
        }
    }
}
