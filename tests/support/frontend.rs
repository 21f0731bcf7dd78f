//! A way to PostgreSQL that writes down what clients say, and may hold it back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// A relay on a port of its own. It ends with the runtime of its test.
#[derive(Debug)]
pub struct Frontend {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    said: Mutex<Vec<String>>,
    gate: Mutex<Option<(String, Arc<Semaphore>)>>,
    held: Semaphore,
}

impl Frontend {
    /// A way to a port of this machine.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let (said, gate, held) = (Mutex::default(), Mutex::default(), Semaphore::new(0));
        let shared = Arc::new(Shared { said, gate, held });
        let this = Self { port, shared: Arc::clone(&shared) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let up = Arc::clone(&shared);
                tokio::spawn(carry(from_client, to_server, Some(up)));
                tokio::spawn(carry(from_server, to_client, None));
            }
        });
        this
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What was said since this was asked last: each query, each statement that was run (by its text),
    /// and `(ping)` for a message that says nothing. What is answered before anything else is sent is one.
    pub fn said(&self) -> Vec<String> {
        std::mem::take(&mut *self.shared.said.lock().expect("no holder panics"))
    }

    /// Holds the next message with these words back until it is let through.
    pub fn hold(&self, words: &str) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        let held = Some((words.to_owned(), Arc::clone(&gate)));
        *self.shared.gate.lock().expect("no holder panics") = held;
        gate
    }

    /// Waits until one is held back.
    pub async fn held(&self) {
        let held = tokio::time::timeout(Duration::from_secs(20), self.shared.held.acquire()).await;
        held.expect("one is held back").expect("it is never closed").forget();
    }
}

async fn carry(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    shared: Option<Arc<Shared>>,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut reader = Reader::default();
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if let Some(shared) = &shared {
            let said = reader.read(&buffer[..read]);
            let gate = {
                let mut gate = shared.gate.lock().expect("no holder panics");
                let meant = gate
                    .as_ref()
                    .is_some_and(|(words, _)| said.iter().any(|said| said.contains(words)));
                if meant { gate.take() } else { None }
            };
            shared.said.lock().expect("no holder panics").extend(said);
            if let Some((_, gate)) = gate {
                shared.held.add_permits(1);
                gate.acquire().await.expect("it is never closed").forget();
            }
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Reads the messages of one client.
#[derive(Debug, Default)]
struct Reader {
    bytes: Vec<u8>,
    started: bool,
    statements: HashMap<Vec<u8>, String>,
    /// What the messages up to the next Sync are about.
    about: Option<String>,
}

impl Reader {
    fn read(&mut self, bytes: &[u8]) -> Vec<String> {
        self.bytes.extend_from_slice(bytes);
        let mut said = Vec::new();
        loop {
            // Before it has started, a message has no kind.
            let head = usize::from(self.started);
            let Some(length) = self.bytes.get(head..head + 4) else { return said };
            let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
            if self.bytes.len() < head + length {
                return said;
            }
            let message: Vec<u8> = self.bytes.drain(..head + length).collect();
            let body = &message[head + 4..];
            if !self.started {
                // Anything but the question for TLS.
                self.started = body[..4] != 80_877_103_u32.to_be_bytes();
                continue;
            }
            let mut parts = body.split(|&byte| byte == 0);
            let mut part = || parts.next().unwrap_or_default();
            match message[0] {
                b'Q' => said.push(plain(part())),
                b'P' => {
                    let (name, text) = (part().to_vec(), plain(part()));
                    self.about = Some(format!("(prepares) {text}"));
                    self.statements.insert(name, text);
                }
                b'B' => {
                    let _portal = part();
                    self.about = self.statements.get(part()).cloned();
                }
                b'S' => said.push(self.about.take().unwrap_or_else(|| "(ping)".to_owned())),
                _ => {}
            }
        }
    }
}

fn plain(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.split_ascii_whitespace().collect::<Vec<_>>().join(" ")
}
