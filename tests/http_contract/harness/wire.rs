//! Real sockets, where the bytes on the wire are what counts.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A server on a port of its own, HTTP/1.1 and HTTP/2, until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(app: Router) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, task }
    }

    pub(crate) async fn connect(&self) -> Raw {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Raw { stream, read: Vec::new() }
    }

    /// One HTTP/1.1 exchange on a connection of its own.
    pub(crate) async fn exchange(&self, bytes: impl AsRef<[u8]>) -> Wire {
        let mut raw = self.connect().await;
        raw.send(bytes).await;
        raw.answer().await
    }

    pub(crate) async fn http2(&self) -> Http2 {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (sender, connection) =
            handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Http2(sender)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An HTTP/2 client.
#[derive(Debug)]
pub(crate) struct Http2(SendRequest<Body>);

impl Http2 {
    pub(crate) async fn send(&mut self, request: Request<Body>) -> Response<Incoming> {
        self.0.ready().await.unwrap();
        self.0.send_request(request).await.unwrap()
    }

    /// The future of an exchange; dropping it resets the stream.
    pub(crate) fn sending(
        &mut self,
        request: Request<Body>,
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + use<> {
        self.0.send_request(request)
    }
}

/// A connection whose bytes are written by hand.
#[derive(Debug)]
pub(crate) struct Raw {
    stream: TcpStream,
    read: Vec<u8>,
}

/// An answer as it came over the wire.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    /// The trailer fields after a chunked body.
    pub(crate) trailers: Vec<u8>,
}

impl Wire {
    /// All lines of a header.
    pub(crate) fn lines(&self, name: &str) -> Vec<&[u8]> {
        let of_it = self.headers.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name));
        of_it.map(|(_, value)| value.as_slice()).collect()
    }

    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.lines(name);
        assert!(lines.len() <= 1, "several lines of {name}");
        lines.first().map(|line| std::str::from_utf8(line).unwrap())
    }

    #[track_caller]
    pub(crate) fn expect(&self, status: u16, replayed: bool) {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        assert_eq!(self.header("idempotent-replayed").is_some(), replayed, "{:?}", self.headers);
    }

    #[track_caller]
    pub(crate) fn expect_code(&self, status: u16, code: &str) {
        let body = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{body}");
        assert!(body.contains(&format!("\"idempotency_{code}\"")), "{body}");
    }
}

impl Raw {
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// As [`send`](Self::send), but the other side may have closed already.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Says that nothing more will be sent.
    pub(crate) async fn half_close(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Waits until the other side has closed.
    pub(crate) async fn closed(&mut self) {
        while self.more().await {}
    }

    /// Reads some bytes; `false` at the end of the stream.
    async fn more(&mut self) -> bool {
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer).await {
            Ok(0) | Err(_) => false,
            Ok(n) => {
                self.read.extend_from_slice(&buffer[..n]);
                true
            }
        }
    }

    /// Reads up to and including `mark`, and gives all before it.
    pub(crate) async fn until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            let found = self.read.windows(mark.len()).position(|window| window == mark);
            if let Some(at) = found {
                let before = self.read[..at].to_vec();
                self.read.drain(..at + mark.len());
                return before;
            }
            assert!(self.more().await, "closed after {:?}", String::from_utf8_lossy(&self.read));
        }
    }

    async fn exactly(&mut self, length: usize) -> Vec<u8> {
        while self.read.len() < length {
            assert!(self.more().await, "closed in the middle of a body");
        }
        self.read.drain(..length).collect()
    }

    /// Status and headers of an answer.
    pub(crate) async fn head(&mut self) -> Wire {
        let head = self.until(b"\r\n\r\n").await;
        let mut lines = head.split(|byte| *byte == b'\n').map(|line| line.trim_ascii());
        let status = std::str::from_utf8(lines.next().unwrap()).unwrap();
        let status = status.split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| {
                let colon = line.iter().position(|byte| *byte == b':').unwrap();
                let name = String::from_utf8(line[..colon].to_vec()).unwrap();
                (name, line[colon + 1..].trim_ascii().to_vec())
            })
            .collect();
        Wire { status, headers, body: Vec::new(), trailers: Vec::new() }
    }

    /// A whole answer.
    pub(crate) async fn answer(&mut self) -> Wire {
        let mut wire = self.head().await;
        let bodiless = wire.status == 204 || wire.status == 304 || wire.status < 200;
        if bodiless {
            return wire;
        }
        if let Some(length) = wire.header("content-length") {
            wire.body = self.exactly(length.parse().unwrap()).await;
        } else if wire.header("transfer-encoding") == Some("chunked") {
            loop {
                let size = String::from_utf8(self.until(b"\r\n").await).unwrap();
                let size = usize::from_str_radix(&size, 16).unwrap();
                if size == 0 {
                    break;
                }
                wire.body.extend(self.exactly(size).await);
                self.exactly(2).await;
            }
            loop {
                let line = self.until(b"\r\n").await;
                if line.is_empty() {
                    break;
                }
                wire.trailers.extend(line);
            }
        } else {
            while self.more().await {}
            wire.body = std::mem::take(&mut self.read);
        }
        wire
    }
}
