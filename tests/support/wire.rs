//! An HTTP/1.1 server that follows a script, and remembers every byte it was sent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// What to do with one request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Answer it.
    Answer(String),
    /// Read it whole, and close the connection without a word.
    Close,
    /// Read its head and a part of its body, and reset the connection.
    ResetInBody,
    /// Read it whole, and reset the connection in the middle of the answer.
    ResetInAnswer(String),
}

/// An answer of this status with these header lines.
pub(crate) fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n" + body
}

/// A refusal as the layer makes it.
pub(crate) fn problem(status: u16, code: &str, retry: bool, after: Option<&str>) -> Act {
    let body = format!(r#"{{"code":"idempotency_{code}","safe_new_key":false,"status":{status}}}"#);
    let retry = if retry { "true" } else { "false" };
    let mut headers =
        vec![("content-type", "application/problem+json"), ("stripe-should-retry", retry)];
    headers.extend(after.map(|after| ("retry-after", after)));
    Act::Answer(answer(status, &headers, &body))
}

/// The answer to a payment.
pub(crate) fn created() -> Act {
    Act::Answer(answer(201, &[("content-type", "application/json")], r#"{"id":"pay_1"}"#))
}

/// The same as a replay.
pub(crate) fn replayed() -> Act {
    let headers = [("content-type", "application/json"), ("idempotent-replayed", "true")];
    Act::Answer(answer(201, &headers, r#"{"id":"pay_1"}"#))
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Received {
    /// All values of a header.
    pub(crate) fn all(&self, name: &str) -> Vec<String> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        let named = lines.filter(|(found, _)| found.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.trim().to_owned()).collect()
    }

    /// The one key it must have.
    #[track_caller]
    pub(crate) fn key(&self) -> String {
        let keys = self.all("idempotency-key");
        assert_eq!(keys.len(), 1, "one key line in\n{}", self.head);
        keys[0].clone()
    }
}

/// The server.
pub(crate) struct Wire {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Wire {
    /// Starts on a free port. The last act is repeated.
    pub(crate) async fn start(script: impl Into<Vec<Act>>) -> Self {
        Self::start_on("127.0.0.1:0".parse().unwrap(), script).await
    }

    pub(crate) async fn start_on(address: SocketAddr, script: impl Into<Vec<Act>>) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let (script, all) = (Arc::new(script.into()), Arc::clone(&received));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&script), Arc::clone(&all)));
            }
        });
        Self { address, received }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, script: Arc<Vec<Act>>, all: Arc<Mutex<Vec<Received>>>) {
    let mut buffer = Vec::new();
    loop {
        let Some(end) = read_head(&mut stream, &mut buffer).await else { return };
        let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
        let received = Received { head, body: Vec::new() };
        let length = received.all("content-length").first().map_or(0, |n| n.parse().unwrap());
        let number = all.lock().unwrap().len();
        let act = script[number.min(script.len() - 1)].clone();
        let wanted = if matches!(act, Act::ResetInBody) { length / 2 } else { length };
        all.lock().unwrap().push(received);
        while buffer.len() < end + wanted {
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let body = buffer[end..(end + length).min(buffer.len())].to_vec();
        all.lock().unwrap()[number].body = body;
        match act {
            Act::Answer(text) => {
                if stream.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
            }
            Act::Close => return,
            Act::ResetInBody => return reset(stream),
            Act::ResetInAnswer(text) => {
                let half = &text.as_bytes()[..text.len() - 4];
                let _ = stream.write_all(half).await;
                // What was written must arrive, or the cut would be before the answer.
                tokio::time::sleep(Duration::from_millis(20)).await;
                return reset(stream);
            }
        }
        buffer.drain(..end + length);
    }
}

/// Reads until a head is whole; where it ends.
async fn read_head(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<usize> {
    loop {
        if let Some(at) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            return Some(at + 4);
        }
        if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
            return None;
        }
    }
}

/// Closes with RST instead of FIN.
pub(crate) fn reset(stream: TcpStream) {
    let _ = stream.set_zero_linger();
    drop(stream);
}
