//! The connection under a shared one: what is written within one turn of the runtime goes out in one piece.
//!
//! A task that sends a command wakes the connection's own task, which would write at once, while other
//! requests that are ready have their commands still to come: a system call for each. So the
//! first flush only lets them come, and the second one, a turn later, writes for all. With nothing else to
//! do a turn is over at once.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use ::redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisResult};
use bytes::{Buf as _, BytesMut};
use futures_util::future::select_ok;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// How long sent bytes may stay unacknowledged before the kernel gives the connection up. Far beyond
/// what a call waits, since the watchdog is faster; it ends connections to hosts that vanished.
#[cfg(target_os = "linux")]
pub(super) const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection is idle before the kernel asks if the other side is there. Below the
/// minutes after which common firewalls forget an idle connection.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// What is gathered before it has to go out, in bytes: more than a busy turn brings, and a piece that
/// kernels take at once.
const GATHERED_MAX: usize = 64 * 1024;

/// A connection and the task that drives it, which ends with it.
pub(super) struct Opened {
    pub(super) connection: MultiplexedConnection,
    /// `None` if the library keeps it.
    pub(super) driver: Option<AbortOnDropHandle<()>>,
}

/// Connects and introduces itself.
pub(super) async fn open(
    client: &Client,
    config: &AsyncConnectionConfig,
    within: Duration,
) -> RedisResult<Opened> {
    let info = client.get_connection_info();
    let opening = async {
        match info.addr() {
            ConnectionAddr::Tcp(host, port) => drive(tcp(host, *port).await?, info, config).await,
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => {
                drive(tokio::net::UnixStream::connect(path).await?, info, config).await
            }
            // TLS gathers by itself what goes into one of its records.
            _ => {
                let connection =
                    client.get_multiplexed_async_connection_with_config(config).await?;
                Ok(Opened { connection, driver: None })
            }
        }
    };
    match timeout(within, opening).await {
        Ok(opened) => opened,
        Err(elapsed) => Err(io::Error::from(elapsed).into()),
    }
}

async fn drive<S>(
    stream: S,
    info: &ConnectionInfo,
    config: &AsyncConnectionConfig,
) -> RedisResult<Opened>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let gathering = Gathering::new(stream);
    let settings = info.redis_settings();
    let (connection, driver) =
        MultiplexedConnection::new_with_config(settings, gathering, config.clone()).await?;
    Ok(Opened { connection, driver: Some(AbortOnDropHandle::new(tokio::spawn(driver))) })
}

/// Of all addresses of a name, the first that answers.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = tokio::net::lookup_host((host, port)).await?;
    let attempts: Vec<_> = addresses.map(|address| Box::pin(TcpStream::connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    let (stream, _) = select_ok(attempts).await?;
    // Without NODELAY a small command waits for the acknowledgement of the one before, which on a
    // real network is a round trip.
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE_IDLE))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
    Ok(stream)
}

/// Gathers what is written until a turn later.
struct Gathering<S> {
    stream: S,
    gathered: BytesMut,
    /// A flush was asked for in an earlier turn.
    turned: bool,
}

impl<S> Gathering<S> {
    fn new(stream: S) -> Self {
        Self { stream, gathered: BytesMut::new(), turned: false }
    }
}

impl<S: AsyncWrite + Unpin> Gathering<S> {
    fn write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.gathered))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.gathered.len() + bytes.len() > GATHERED_MAX {
            ready!(self.write_out(cx))?;
            // A large one is not worth a copy.
            if bytes.len() >= GATHERED_MAX / 4 {
                return Pin::new(&mut self.stream).poll_write(cx, bytes);
            }
        }
        self.gathered.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.gathered.is_empty() {
            if !self.turned {
                self.turned = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            ready!(self.write_out(cx))?;
        }
        self.turned = false;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_out(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Counts the writes that reach it.
    struct Counting<S>(S, usize);

    impl<S: AsyncWrite + Unpin> AsyncWrite for Counting<S> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.1 += 1;
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn what_is_written_before_a_flush_goes_out_in_one_piece_and_in_order() {
        let (here, mut there) = duplex(1 << 20);
        let mut stream = Gathering::new(Counting(here, 0));
        for part in [&b"one "[..], b"two ", b"three"] {
            stream.write_all(part).await.unwrap();
        }
        assert_eq!(stream.stream.1, 0);
        stream.flush().await.unwrap();
        assert_eq!(stream.stream.1, 1);
        let mut read = [0; 13];
        there.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"one two three");
    }

    #[tokio::test]
    async fn a_flush_lets_others_write_first() {
        let (here, _there) = duplex(1 << 20);
        let mut stream = Gathering::new(Counting(here, 0));
        stream.write_all(b"a").await.unwrap();
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(Pin::new(&mut stream).poll_flush(&mut cx).is_pending());
        stream.write_all(b"b").await.unwrap();
        assert!(Pin::new(&mut stream).poll_flush(&mut cx).is_ready());
        assert_eq!(stream.stream.1, 1);
        // And the next flush begins anew.
        stream.write_all(b"c").await.unwrap();
        assert!(Pin::new(&mut stream).poll_flush(&mut cx).is_pending());
    }

    #[tokio::test]
    async fn more_than_it_gathers_goes_through_a_narrow_stream_whole() {
        let (here, mut there) = duplex(1_000);
        let sent: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let expected = sent.clone();
        let writing = tokio::spawn(async move {
            let mut stream = Gathering::new(here);
            for part in sent.chunks(7_001) {
                stream.write_all(part).await.unwrap();
            }
            stream.write_all(&[9; 100_000]).await.unwrap();
            stream.shutdown().await.unwrap();
        });
        let mut read = Vec::new();
        there.read_to_end(&mut read).await.unwrap();
        writing.await.unwrap();
        assert_eq!(read[..300_000], expected);
        assert_eq!(read[300_000..], [9; 100_000]);
    }
}
