//! A TCP proxy that cuts some of its connections: before, during and after the request.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::wire::reset;

/// Where a connection is cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cut {
    Nowhere,
    /// Before a byte of the request is passed on.
    Before,
    /// After so many bytes of the request.
    InRequest(usize),
    /// After so many bytes of the answer; 0: the server has done everything, the client hears nothing.
    InAnswer(usize),
}

/// How often what happened.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) whole: AtomicUsize,
    pub(crate) before: AtomicUsize,
    pub(crate) in_request: AtomicUsize,
    pub(crate) in_answer: AtomicUsize,
}

/// The running proxy.
pub(crate) struct CuttingProxy {
    pub(crate) address: SocketAddr,
    pub(crate) counts: Arc<Counts>,
}

/// Longer than the requests and answers that go through, so that every byte of them can be the last.
const REQUEST: usize = 420;
const ANSWER: usize = 520;

impl CuttingProxy {
    /// Cuts this part of the connections, by a seed: from 0 to 1.
    pub(crate) async fn start(target: SocketAddr, part: f64, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        Self::with(target, move |_| {
            if !random.random_bool(part) {
                return Cut::Nowhere;
            }
            match random.random_range(0..3) {
                0 => Cut::Before,
                1 => Cut::InRequest(random.random_range(1..REQUEST)),
                _ => Cut::InAnswer(random.random_range(0..ANSWER)),
            }
        })
        .await
    }

    /// Cuts as it is told for each connection, counted from 0.
    pub(crate) async fn with(
        target: SocketAddr,
        mut choose: impl FnMut(usize) -> Cut + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counts = Arc::new(Counts::default());
        let shared = Arc::clone(&counts);
        tokio::spawn(async move {
            for number in 0.. {
                let Ok((client, _)) = listener.accept().await else { return };
                let (cut, counts) = (choose(number), Arc::clone(&shared));
                tokio::spawn(async move { carry(client, target, cut, &counts).await });
            }
        });
        Self { address, counts }
    }
}

async fn carry(client: TcpStream, target: SocketAddr, cut: Cut, counts: &Counts) {
    if cut == Cut::Before {
        counts.before.fetch_add(1, Ordering::Relaxed);
        return reset(client);
    }
    let Ok(server) = TcpStream::connect(target).await else { return reset(client) };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (request, answer) = match cut {
        Cut::Nowhere | Cut::Before => (usize::MAX, usize::MAX),
        Cut::InRequest(bytes) => (bytes, usize::MAX),
        Cut::InAnswer(bytes) => (usize::MAX, bytes),
    };
    // Whichever direction ends first ends the connection.
    let counter = tokio::select! {
        true = copy(&mut from_client, &mut to_server, request) => &counts.in_request,
        true = copy(&mut from_server, &mut to_client, answer) => &counts.in_answer,
        else => &counts.whole,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    if !std::ptr::eq(counter, &counts.whole) {
        if let Ok(client) = from_client.reunite(to_client) {
            reset(client);
        }
        if let Ok(server) = from_server.reunite(to_server) {
            reset(server);
        }
    }
}

/// Copies up to so many bytes; true if it was that bound that ended it.
async fn copy(
    from: &mut (impl tokio::io::AsyncRead + Unpin),
    to: &mut (impl tokio::io::AsyncWrite + Unpin),
    mut left: usize,
) -> bool {
    let mut buffer = [0; 4096];
    loop {
        let read = match from.read(&mut buffer).await {
            Ok(read) if read > 0 => read,
            Ok(_) | Err(_) => {
                let _ = to.shutdown().await;
                return false;
            }
        };
        let pass = read.min(left);
        if to.write_all(&buffer[..pass]).await.is_err() {
            return false;
        }
        left -= pass;
        // With a bound of 0 the answer is awaited, and dropped.
        if left == 0 || pass < read {
            return true;
        }
    }
}
