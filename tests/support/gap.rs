//! A way to a Redis on which something happens between a claim that finds a large answer and the GET that
//! reads it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// What the claim script says of a large answer.
const LARGE: &[u8] = b"*1\r\n:7\r\n";

type Act = Box<dyn FnOnce() + Send>;

/// A relay on a port of its own. It ends with the runtime of its test.
pub(crate) struct Gap {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    act: Mutex<Option<Act>>,
    met: AtomicUsize,
}

impl Gap {
    /// A way to a port of this machine.
    pub(crate) async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound port").port();
        let shared = Arc::new(Shared::default());
        let this = Self { port, shared: Arc::clone(&shared) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, target, Arc::clone(&shared)));
            }
        });
        this
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Does this before the client hears of the next large answer, so before it can ask for it.
    pub(crate) fn meanwhile(&self, act: impl FnOnce() + Send + 'static) {
        *self.shared.act.lock().expect("no holder panics") = Some(Box::new(act));
    }

    /// How often something was done.
    pub(crate) fn met(&self) -> usize {
        self.shared.met.load(Ordering::SeqCst)
    }
}

async fn carry(mut client: TcpStream, target: u16, shared: Arc<Shared>) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let (mut up, mut down) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        tokio::select! {
            read = client.read(&mut up) => {
                let Ok(length @ 1..) = read else { return };
                if server.write_all(&up[..length]).await.is_err() {
                    return;
                }
            }
            read = server.read(&mut down) => {
                let Ok(length @ 1..) = read else { return };
                if down[..length].windows(LARGE.len()).any(|window| window == LARGE) {
                    let act = shared.act.lock().expect("no holder panics").take();
                    if let Some(act) = act {
                        tokio::task::spawn_blocking(act).await.expect("it can be done");
                        shared.met.fetch_add(1, Ordering::SeqCst);
                    }
                }
                if client.write_all(&down[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}
