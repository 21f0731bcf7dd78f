//! A way to PostgreSQL that breaks at a COMMIT, goes silent, or is slow.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What happens to the next COMMIT.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// It is done, and the connection ends before the server can say so.
    ReplyLost,
    /// The connection ends before it arrives.
    RequestLost,
    /// It is done, and from then on nothing goes through, while the connection stays open.
    ReplySwallowed,
    /// It does not arrive, and from then on nothing goes through, while the connection stays open.
    RequestSwallowed,
    /// It does not arrive before the client is gone, and then the connection ends.
    RequestHeld,
}

/// A relay on a port of its own. It ends with the runtime of its test.
#[derive(Debug)]
pub struct Breaking {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    armed: Mutex<Option<Fault>>,
    met: AtomicUsize,
    /// Connections made before this number changed are silent.
    era: watch::Sender<u64>,
    delay_ms: AtomicU64,
}

impl Breaking {
    /// A way to a port of this machine.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let shared = Arc::new(Shared {
            armed: Mutex::default(),
            met: AtomicUsize::new(0),
            era: watch::Sender::new(0),
            delay_ms: AtomicU64::new(0),
        });
        let this = Self { port, shared: Arc::clone(&shared) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, target, Arc::clone(&shared)));
            }
        });
        this
    }

    /// An address, by this way.
    pub fn url(&self, url: &str, target: u16) -> String {
        url.replace(&format!(":{target}/"), &format!(":{}/", self.port))
    }

    /// Has the next COMMIT meet this.
    pub fn arm(&self, fault: Fault) {
        *self.shared.armed.lock().expect("no holder panics") = Some(fault);
    }

    /// How many COMMITs have met what was armed.
    pub fn met(&self) -> usize {
        self.shared.met.load(Ordering::SeqCst)
    }

    /// From now on nothing goes through the connections that are open, either way, not even their end.
    pub fn go_silent(&self) {
        self.shared.era.send_modify(|era| *era += 1);
    }

    /// Every piece that goes either way takes that much longer.
    pub fn delay(&self, by: Duration) {
        let ms = u64::try_from(by.as_millis()).expect("a short time");
        self.shared.delay_ms.store(ms, Ordering::SeqCst);
    }
}

async fn carry(mut client: TcpStream, target: u16, shared: Arc<Shared>) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let (mut up, mut down) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut era = shared.era.subscribe();
    let wait = async || {
        let delay = shared.delay_ms.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(delay)).await;
    };
    loop {
        tokio::select! {
            biased;
            _ = era.changed() => break,
            read = client.read(&mut up) => {
                let Ok(length @ 1..) = read else { return };
                let is_commit = up[..length].windows(7).any(|window| window == b"COMMIT\0");
                let fault = match is_commit {
                    true => shared.armed.lock().expect("no holder panics").take(),
                    false => None,
                };
                shared.met.fetch_add(usize::from(fault.is_some()), Ordering::SeqCst);
                match fault {
                    Some(Fault::RequestLost) => return,
                    Some(Fault::RequestSwallowed) => break,
                    Some(Fault::RequestHeld) => {
                        while let Ok(1..) = client.read(&mut up).await {}
                        return;
                    }
                    Some(Fault::ReplyLost | Fault::ReplySwallowed) | None => {}
                }
                wait().await;
                if server.write_all(&up[..length]).await.is_err() {
                    return;
                }
                match fault {
                    Some(Fault::ReplyLost | Fault::ReplySwallowed) => {
                        // The server has done it and says so, and nobody hears it.
                        let _ = server.read(&mut down).await;
                        if fault == Some(Fault::ReplyLost) {
                            return;
                        }
                        break;
                    }
                    Some(Fault::RequestLost | Fault::RequestSwallowed | Fault::RequestHeld) | None => {}
                }
            }
            read = server.read(&mut down) => {
                let Ok(length @ 1..) = read else { return };
                wait().await;
                if client.write_all(&down[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
    // Both ends stay open, and neither hears of the other again.
    std::future::pending::<()>().await;
    drop((client, server));
}
