//! A way to a server on which exchanges go wrong: cut before, during or after the answer, delayed,
//! swallowed.
//!
//! It reads no HTTP. On an HTTP/1.1 connection requests and answers take turns, so whatever a
//! client sends after the server has spoken is a new exchange, and each one meets a fate of its own.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// What happens to one exchange.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fate {
    /// Nothing.
    Pass,
    /// The connection ends before the request reaches the server.
    CutRequest,
    /// The server gets the request and answers; the client sees the end instead.
    CutBeforeAnswer,
    /// The client gets this many bytes of the answer, then the end.
    CutAfterBytes(usize),
    /// The client gets the head of the answer and a little of its body, then the end.
    CutInBody,
    /// The client gets the answer, then the end.
    CutAfterAnswer,
    /// The request reaches the server this much later.
    Delay(Duration),
    /// The request goes nowhere and the connection stays open.
    Swallow,
}

/// Of a body that is cut this much arrives.
const LITTLE: usize = 8;

/// Where the head of an answer ends, as far as it is here.
fn head(answer: &[u8]) -> usize {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    end.map_or(answer.len(), |end| end + 4)
}

type Choose = dyn Fn(u64) -> Fate + Send + Sync;

/// A proxy on a port of its own. It ends with the runtime of its test.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    choose: Mutex<Arc<Choose>>,
    exchanges: AtomicU64,
    cut: AtomicU64,
}

/// After this much silence an answer is taken to be whole.
const SILENCE: Duration = Duration::from_millis(40);
/// A connection that nobody uses is dropped.
const IDLE: Duration = Duration::from_secs(60);

impl Proxy {
    /// A proxy to this address on which everything passes.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound port");
        let shared = Arc::new(Shared {
            target,
            choose: Mutex::new(Arc::new(|_| Fate::Pass)),
            exchanges: AtomicU64::new(0),
            cut: AtomicU64::new(0),
        });
        let this = Self { address, shared: Arc::clone(&shared) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move {
                    let _ = client.set_nodelay(true);
                    // A connection that ends early is what this is for.
                    let _ = shared.carry(client).await;
                });
            }
        });
        this
    }

    /// The address as an HTTP URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Exchanges meet these fates from now on, in this order; later ones pass.
    pub fn next(&self, fates: &[Fate]) {
        let (first, fates) = (self.exchanges(), fates.to_vec());
        self.choose(move |exchange| {
            let index = usize::try_from(exchange - first).expect("few exchanges");
            fates.get(index).copied().unwrap_or(Fate::Pass)
        });
    }

    /// Exchanges meet the fate that this chooses from now on, by their number.
    pub fn choose(&self, choose: impl Fn(u64) -> Fate + Send + Sync + 'static) {
        *self.shared.choose.lock().expect("no holder panics") = Arc::new(choose);
    }

    /// How many exchanges there were.
    pub fn exchanges(&self) -> u64 {
        self.shared.exchanges.load(Ordering::SeqCst)
    }

    /// How many of them were cut.
    pub fn cut(&self) -> u64 {
        self.shared.cut.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn fate(&self) -> Fate {
        let choose = Arc::clone(&self.choose.lock().expect("no holder panics"));
        let fate = choose(self.exchanges.fetch_add(1, Ordering::SeqCst));
        if !matches!(fate, Fate::Pass | Fate::Delay(_)) {
            self.cut.fetch_add(1, Ordering::SeqCst);
        }
        fate
    }

    async fn carry(&self, mut client: TcpStream) -> std::io::Result<()> {
        let mut server = TcpStream::connect(self.target).await?;
        server.set_nodelay(true)?;
        let (mut up, mut down) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        // The fate of the exchange that is going on, and how much of its answer was passed on.
        let mut current: Option<(Fate, usize)> = None;
        loop {
            let answered = current.is_some_and(|(_, passed)| passed > 0);
            let last_words = matches!(current, Some((Fate::CutAfterAnswer, _))) && answered;
            tokio::select! {
                read = client.read(&mut up) => {
                    let length = read?;
                    if length == 0 {
                        return Ok(());
                    }
                    if current.is_none() || answered {
                        let fate = self.fate();
                        current = Some((fate, 0));
                        match fate {
                            Fate::CutRequest => return Ok(()),
                            Fate::Delay(time) => sleep(time).await,
                            Fate::Pass
                            | Fate::CutBeforeAnswer
                            | Fate::CutAfterBytes(_)
                            | Fate::CutInBody
                            | Fate::CutAfterAnswer
                            | Fate::Swallow => {}
                        }
                    }
                    if !matches!(current, Some((Fate::Swallow, _))) {
                        server.write_all(&up[..length]).await?;
                    }
                }
                read = server.read(&mut down) => {
                    let length = read?;
                    if length == 0 {
                        return Ok(());
                    }
                    let Some((fate, passed)) = &mut current else { return Ok(()) };
                    if *fate == Fate::CutInBody {
                        *fate = Fate::CutAfterBytes(head(&down[..length]) + LITTLE);
                    }
                    let length = match fate {
                        Fate::CutBeforeAnswer => return Ok(()),
                        Fate::CutAfterBytes(limit) => length.min(*limit - *passed),
                        Fate::Pass
                        | Fate::CutRequest
                        | Fate::CutInBody
                        | Fate::CutAfterAnswer
                        | Fate::Delay(_)
                        | Fate::Swallow => length,
                    };
                    client.write_all(&down[..length]).await?;
                    *passed += length;
                    if *fate == Fate::CutAfterBytes(*passed) {
                        return Ok(());
                    }
                }
                () = sleep(if last_words { SILENCE } else { IDLE }) => return Ok(()),
            }
        }
    }
}
