//! A way to a server that can be led elsewhere or made to swallow what is sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A relay on a port of its own. It ends with the runtime of its test.
#[derive(Debug)]
pub struct Relay {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: AtomicU16,
    /// Connections made before this number changed swallow everything.
    era: AtomicU64,
}

impl Relay {
    /// A relay that leads to a port of this machine.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let shared = Arc::new(Shared { target: target.into(), era: AtomicU64::new(0) });
        let this = Self { port, shared: Arc::clone(&shared) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let target = shared.target.load(Ordering::SeqCst);
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { continue };
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                let era = shared.era.load(Ordering::SeqCst);
                tokio::spawn(carry(client_in, server_out, Arc::clone(&shared), era));
                tokio::spawn(carry(server_in, client_out, Arc::clone(&shared), era));
            }
        });
        this
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Leads new connections elsewhere; open ones stay where they are.
    pub fn lead_to(&self, target: u16) {
        self.shared.target.store(target, Ordering::SeqCst);
    }

    /// From here on, what is sent on the connections that are open goes nowhere; they stay open.
    pub fn swallow_open_connections(&self) {
        self.shared.era.fetch_add(1, Ordering::SeqCst);
    }
}

async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    shared: Arc<Shared>,
    era: u64,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let swallowed = shared.era.load(Ordering::SeqCst) != era;
        if !swallowed && to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
