//! Opening a connection: the library introduces us, and we take over.
//!
//! Who we are, which database, which name: the library says all that, and hears the answers. Then
//! [`Wire`] has the stream for itself. Through TLS, and in the newer protocol, the library keeps it.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use ::redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ProtocolVersion, RedisResult,
};
use futures_util::future::select_ok;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::link::Line;
use super::wire::Wire;

/// How long sent bytes may stay unacknowledged before the kernel gives the connection up. Far beyond
/// what a call waits, since the watchdog is faster; it ends connections to hosts that vanished.
#[cfg(target_os = "linux")]
pub(super) const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection is idle before the kernel asks if the other side is there. Below the
/// minutes after which common firewalls forget an idle connection.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Connects and introduces itself.
pub(super) async fn open(
    client: &Client,
    config: &AsyncConnectionConfig,
    within: Duration,
) -> RedisResult<Line> {
    let info = client.get_connection_info();
    let is_old = !matches!(info.redis_settings().protocol(), ProtocolVersion::RESP3);
    let opening = async {
        match info.addr() {
            ConnectionAddr::Tcp(host, port) if is_old => {
                take_over(tcp(host, *port).await?, info, config).await
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) if is_old => {
                take_over(tokio::net::UnixStream::connect(path).await?, info, config).await
            }
            _ => {
                let connection = client.get_multiplexed_async_connection_with_config(config);
                Ok(Line::Library(connection.await?))
            }
        }
    };
    match timeout(within, opening).await {
        Ok(opened) => opened,
        Err(_) => {
            let late = format!("no connection within {within:?}, the connect_timeout");
            Err(io::Error::new(io::ErrorKind::TimedOut, late).into())
        }
    }
}

async fn take_over<S>(
    stream: S,
    info: &ConnectionInfo,
    config: &AsyncConnectionConfig,
) -> RedisResult<Line>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (lent, take_back) = lend(stream);
    let settings = info.redis_settings();
    let made = MultiplexedConnection::new_with_config(settings, lent, config.clone()).await?;
    // It has its answers, and a server says nothing unasked in the older protocol.
    drop(made);
    let stream = take_back().ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
    Ok(Line::Own(Wire::over(stream)))
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

/// A stream that is lent out and can be taken back.
struct Lent<S>(Arc<Mutex<Option<S>>>);

fn lend<S>(stream: S) -> (Lent<S>, impl FnOnce() -> Option<S>) {
    let here = Arc::new(Mutex::new(Some(stream)));
    let there = Arc::clone(&here);
    (Lent(there), move || here.lock().ok()?.take())
}

impl<S: Unpin> Lent<S> {
    fn with<T>(
        &self,
        use_it: impl FnOnce(Pin<&mut S>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.0.lock().ok().as_deref_mut() {
            Some(Some(stream)) => use_it(Pin::new(stream)),
            Some(None) | None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lent<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_read(cx, buffer))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Lent<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.with(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|stream| stream.poll_shutdown(cx))
    }
}
