//! A way to a Redis on which something happens between a claim that finds a large answer and the GET that
//! reads it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// What the claim script says of a large answer.
const LARGE: &[u8] = b"*1\r\n:7\r\n";

enum Act {
    Once(Box<dyn FnOnce() + Send>),
    /// Before what is read goes out, and when it has been read.
    Always(Arc<dyn Fn() + Send + Sync>, Arc<dyn Fn() + Send + Sync>),
}

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

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Does this before the client hears of the next large answer, so before it can ask for it.
    pub(crate) fn meanwhile(&self, act: impl FnOnce() + Send + 'static) {
        self.set(Some(Act::Once(Box::new(act))));
    }

    /// Does this before the client hears of any large answer, and that once it has been told what is there
    /// instead.
    pub(crate) fn always(
        &self,
        before: impl Fn() + Send + Sync + 'static,
        after: impl Fn() + Send + Sync + 'static,
    ) {
        self.set(Some(Act::Always(Arc::new(before), Arc::new(after))));
    }

    /// Does nothing any more.
    pub(crate) fn never(&self) {
        self.set(None);
    }

    fn set(&self, act: Option<Act>) {
        *self.shared.act.lock().expect("no holder panics") = act;
    }

    /// How often something was done.
    pub(crate) fn met(&self) -> usize {
        self.shared.met.load(Ordering::SeqCst)
    }
}

async fn carry(mut client: TcpStream, target: u16, shared: Arc<Shared>) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    let (mut up, mut down) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut afterwards: Option<Arc<dyn Fn() + Send + Sync>> = None;
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
                if let Some(after) = afterwards.take() {
                    tokio::task::spawn_blocking(move || after()).await.expect("it can be done");
                }
                if down[..length].windows(LARGE.len()).any(|window| window == LARGE)
                    && let Some(now) = next(&shared, &mut afterwards)
                {
                    tokio::task::spawn_blocking(now).await.expect("it can be done");
                    shared.met.fetch_add(1, Ordering::SeqCst);
                }
                if client.write_all(&down[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// What to do now; and what to do when the next reply has come.
fn next(
    shared: &Shared,
    afterwards: &mut Option<Arc<dyn Fn() + Send + Sync>>,
) -> Option<Box<dyn FnOnce() + Send>> {
    let mut act = shared.act.lock().expect("no holder panics");
    match act.take()? {
        Act::Once(once) => Some(once),
        Act::Always(before, after) => {
            *afterwards = Some(Arc::clone(&after));
            let now = Arc::clone(&before);
            *act = Some(Act::Always(before, after));
            Some(Box::new(move || now()))
        }
    }
}
