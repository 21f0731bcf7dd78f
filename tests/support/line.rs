//! A TCP proxy of our own between a server and what it calls: delays, cuts, cuts after so many bytes,
//! swallows, each way; and replies to chosen messages that are lost. It counts what it did, so that a test whose fault
//! was never hit fails.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// From the client to the server.
    Up,
    /// From the server to the client.
    Down,
}

/// How a reply is lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Loss {
    /// The connection ends in its place.
    Cut,
    /// The connection stays open, and nothing comes on it any more.
    Silence,
}

/// Messages whose replies are lost.
#[derive(Debug)]
struct Losing {
    loss: Loss,
    word: Vec<u8>,
    left: usize,
}

/// A proxy on a port of its own. It ends with the runtime of its test.
#[derive(Clone, Debug)]
pub struct Proxy {
    port: u16,
    switches: Arc<Switches>,
}

#[derive(Debug, Default)]
struct Direction {
    swallow: AtomicBool,
    delay_ms: AtomicU64,
    cut_after: Mutex<Option<usize>>,
}

#[derive(Debug)]
struct Switches {
    refuse: AtomicBool,
    up: Direction,
    down: Direction,
    losing: Mutex<Option<Losing>>,
    /// Connections made before this number changed are cut.
    era: watch::Sender<u64>,
    /// Nothing is accepted meanwhile.
    gone: watch::Sender<bool>,
    /// What takes up the room for connections that wait to be accepted.
    fillers: Mutex<Vec<TcpStream>>,
    hits: AtomicU64,
    /// Messages that came on a connection behind one whose reply is lost.
    behind: AtomicU64,
}

impl Switches {
    fn direction(&self, way: Way) -> &Direction {
        match way {
            Way::Up => &self.up,
            Way::Down => &self.down,
        }
    }

    /// How the reply to this message is lost, if it is.
    fn loss(&self, message: &[u8]) -> Option<Loss> {
        let mut losing = self.losing.lock().expect("no holder panics");
        let Losing { loss, word, left } = losing.as_mut()?;
        if *left == 0 || !message.windows(word.len()).any(|part| part == word.as_slice()) {
            return None;
        }
        *left -= 1;
        self.hit();
        Some(*loss)
    }

    fn hit(&self) {
        self.hits.fetch_add(1, Ordering::SeqCst);
    }
}

impl Proxy {
    /// A proxy that leads to a port of this machine.
    pub async fn to(target: u16) -> Self {
        Self::over(TcpListener::bind("127.0.0.1:0").await.expect("a free port"), target)
    }

    /// The same, with next to no room for connections that wait to be accepted, so that it can vanish.
    pub async fn narrow(target: u16) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        Self::over(socket.listen(1).expect("a bound port"), target)
    }

    fn over(listener: TcpListener, target: u16) -> Self {
        let port = listener.local_addr().expect("a bound port").port();
        let switches = Arc::new(Switches {
            refuse: AtomicBool::new(false),
            up: Direction::default(),
            down: Direction::default(),
            losing: Mutex::default(),
            era: watch::Sender::new(0),
            gone: watch::Sender::new(false),
            fillers: Mutex::default(),
            hits: AtomicU64::new(0),
            behind: AtomicU64::new(0),
        });
        let shared = Arc::clone(&switches);
        tokio::spawn(async move {
            let mut gone = shared.gone.subscribe();
            while gone.wait_for(|gone| !gone).await.is_ok() {
                let accepted = tokio::select! {
                    biased;
                    _ = gone.changed() => continue,
                    accepted = listener.accept() => accepted,
                };
                let Ok((client, _)) = accepted else { return };
                if shared.refuse.load(Ordering::SeqCst) {
                    shared.hit();
                    continue; // and close it
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { continue };
                let (client_in, client_out) = client.into_split();
                let (server_in, server_out) = server.into_split();
                let lost: Arc<Mutex<Option<Loss>>> = Arc::default();
                for (from, to, way) in
                    [(client_in, server_out, Way::Up), (server_in, client_out, Way::Down)]
                {
                    let (era, lost) = (shared.era.subscribe(), Arc::clone(&lost));
                    tokio::spawn(carry(from, to, way, Arc::clone(&shared), era, lost));
                }
            }
        });
        Self { port, switches }
    }

    /// The address of a Redis behind it.
    pub fn redis_url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Cuts all connections, and those that are made from now on at once.
    pub fn refuse(&self) {
        self.switches.refuse.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// Cuts all connections that are open.
    pub fn cut(&self) {
        self.switches.era.send_modify(|era| *era += 1);
    }

    /// Cuts the connection that carries the given number of bytes more this way; those before them
    /// arrive.
    pub fn cut_after(&self, way: Way, bytes: usize) {
        *self.switches.direction(way).cut_after.lock().expect("no holder panics") = Some(bytes);
    }

    /// The next messages that have this word in them, so many of them, reach the server, and their replies are lost like
    /// this, with all that would come after them on the same connection. Others pass.
    pub fn lose_replies(&self, loss: Loss, word: &str, messages: usize) {
        let losing = Losing { loss, word: word.into(), left: messages };
        *self.switches.losing.lock().expect("no holder panics") = Some(losing);
    }

    /// From now on what goes this way goes nowhere; connections stay open.
    pub fn swallow(&self, way: Way) {
        self.switches.direction(way).swallow.store(true, Ordering::SeqCst);
    }

    /// Goes as a machine whose cable was pulled: connections stay open and carry nothing, and whoever
    /// connects gets no answer, not even a refusal. It has to be a narrow one, on Linux.
    pub async fn vanish(&self) {
        self.swallow(Way::Up);
        self.swallow(Way::Down);
        self.switches.gone.send_replace(true);
        let limit = Duration::from_millis(300);
        for _ in 0..16 {
            let connecting = TcpStream::connect(("127.0.0.1", self.port));
            let Ok(filler) = tokio::time::timeout(limit, connecting).await else { return };
            let filler = filler.expect("a connection that waits to be accepted");
            self.switches.fillers.lock().expect("no holder panics").push(filler);
        }
        panic!("it still answers: this is no narrow one");
    }

    /// From now on everything that goes this way takes that much longer.
    pub fn delay(&self, way: Way, by: Duration) {
        let ms = u64::try_from(by.as_millis()).expect("a short time");
        self.switches.direction(way).delay_ms.store(ms, Ordering::SeqCst);
    }

    /// Takes everything back. Connections of which a part was swallowed cannot go on, so all are cut.
    pub fn heal(&self) {
        self.switches.refuse.store(false, Ordering::SeqCst);
        for way in [Way::Up, Way::Down] {
            let direction = self.switches.direction(way);
            direction.swallow.store(false, Ordering::SeqCst);
            direction.delay_ms.store(0, Ordering::SeqCst);
            *direction.cut_after.lock().expect("no holder panics") = None;
        }
        *self.switches.losing.lock().expect("no holder panics") = None;
        self.switches.fillers.lock().expect("no holder panics").clear();
        self.switches.gone.send_replace(false);
        self.cut();
    }

    /// How often something was sent on a connection on which a reply is lost.
    pub fn sent_behind_lost_replies(&self) -> u64 {
        self.switches.behind.load(Ordering::SeqCst)
    }

    /// How often a fault was hit since it was asked last.
    pub fn hits(&self) -> u64 {
        self.switches.hits.swap(0, Ordering::SeqCst)
    }
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    way: Way,
    switches: Arc<Switches>,
    mut era: watch::Receiver<u64>,
    lost: Arc<Mutex<Option<Loss>>>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read,
            _ = era.changed() => return, // dropping both halves closes the connection
        };
        let Ok(length @ 1..) = read else { return };
        let is_lost = {
            let mut lost = lost.lock().expect("no holder panics");
            match way {
                // Before it is passed on: its reply may be quick.
                Way::Up => {
                    if lost.is_some() {
                        switches.behind.fetch_add(1, Ordering::SeqCst);
                    }
                    *lost = lost.or_else(|| switches.loss(&buffer[..length]));
                    None
                }
                Way::Down => *lost,
            }
        };
        match is_lost {
            Some(Loss::Cut) => return,
            Some(Loss::Silence) => continue,
            None => {}
        }
        if pass(&buffer[..length], &mut to, way, &switches).await.is_err() {
            // The other direction ends as well: what was written, or was to be, is lost.
            switches.era.send_modify(|era| *era += 1);
            return;
        }
    }
}

async fn pass(
    bytes: &[u8],
    to: &mut OwnedWriteHalf,
    way: Way,
    switches: &Switches,
) -> io::Result<()> {
    let direction = switches.direction(way);
    let delay = direction.delay_ms.load(Ordering::SeqCst);
    if delay > 0 {
        switches.hit();
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    if direction.swallow.load(Ordering::SeqCst) {
        switches.hit();
        return Ok(());
    }
    let cut_at = {
        let mut cut_after = direction.cut_after.lock().expect("no holder panics");
        match *cut_after {
            Some(left) if left < bytes.len() => {
                *cut_after = None;
                Some(left)
            }
            Some(left) => {
                *cut_after = Some(left - bytes.len());
                None
            }
            None => None,
        }
    };
    let Some(length) = cut_at else { return to.write_all(bytes).await };
    switches.hit();
    to.write_all(&bytes[..length]).await?;
    Err(io::ErrorKind::ConnectionAborted.into())
}
