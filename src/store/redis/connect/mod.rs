//! Where connections come from, and what becomes of them when something goes wrong.
//!
//! Two providers: one shared connection that is watched and replaced, and a pool that the program
//! runs already. Neither repeats a call: a script that may have run is reported as such, and
//! whoever knows the claim decides.

mod pool;
mod shared;

use std::fmt;
use std::time::Duration;

use ::redis::{
    AsyncConnectionConfig, Client, ErrorKind, IntoConnectionInfo, RedisError, RedisResult, Value,
};

pub(super) use pool::Pooled;
pub(super) use shared::Shared;

use super::script::Call;
use crate::error::StoreErrorKind;

pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// How long a call waits for a connection, and then again for its reply.
///
/// A healthy Redis answers within a few milliseconds. Six tenths of a second ride over most pauses,
/// and let the engine send a claim several times before its client runs out of patience.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(600);

/// How long it may take to make a connection: name, TCP, authentication.
///
/// One lost SYN is sent again after a second, so two seconds survive one; and a start against a
/// frozen server fails within three, the version check included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long sent bytes may stay unacknowledged before the kernel gives the connection up. Far beyond
/// what a call waits, since the watchdog is faster; it ends connections to hosts that vanished.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection is idle before the kernel asks if the other side is there. Below the
/// minutes after which common firewalls forget an idle connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Which calls may wait for which.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Urgency {
    /// A claim may wait: nothing runs yet.
    Ordinary,
    /// A handler runs, or has run: its renewal and its completion must not queue behind claims.
    Urgent,
}

/// Why there is no reply that a script gave.
#[derive(Debug)]
pub(super) enum Failure {
    /// Nothing was sent.
    NotSent(Cause),
    /// The server refused: it answered with an error, and nothing was done.
    Refused(RedisError),
    /// It was sent, or may have been, and there is no answer.
    NoAnswer(Cause),
}

impl Failure {
    fn of_reply(error: RedisError) -> Self {
        if is_answer(&error) { Self::Refused(error) } else { Self::NoAnswer(error.into()) }
    }

    /// What it means for the caller.
    pub(super) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::NotSent(_) => StoreErrorKind::Unavailable,
            Self::NoAnswer(_) => StoreErrorKind::OutcomeUnknown,
            Self::Refused(error) => refusal(error),
        }
    }

    pub(super) fn into_cause(self) -> Cause {
        match self {
            Self::NotSent(cause) | Self::NoAnswer(cause) => cause,
            Self::Refused(error) => error.into(),
        }
    }
}

/// True if the server said it, false if the connection failed under us.
fn is_answer(error: &RedisError) -> bool {
    // An extension is a code that redis-rs has no name for. All other kinds are made on this side.
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// What the server's refusal means. Scripts write once, as the last thing they do, so a refusal
/// always means that nothing was done.
fn refusal(error: &RedisError) -> StoreErrorKind {
    match error.code() {
        Some("OOM") => StoreErrorKind::Full,
        Some(
            "READONLY" | "LOADING" | "MASTERDOWN" | "BUSY" | "CLUSTERDOWN" | "TRYAGAIN" | "MISCONF"
            | "NOREPLICAS",
        ) => StoreErrorKind::Unavailable,
        // NOPERM, NOAUTH, an error in a script: it does not pass by waiting.
        Some(_) | None => StoreErrorKind::Backend,
    }
}

/// True if the server is a replica. It will refuse every write on this connection for ever, while a
/// new connection, by name or through a proxy, may lead to the primary.
fn is_readonly(error: &RedisError) -> bool {
    error.code() == Some("READONLY")
}

/// A step that took too long.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum TooLong {
    #[error("no connection within {0:?}")]
    Connection(Duration),
    #[error("no free slot in the pool within {0:?}")]
    Slot(Duration),
    #[error("no reply within {0:?}")]
    Reply(Duration),
}

/// Where connections come from.
pub(super) enum Connections {
    Shared(Shared),
    Pool(Pooled),
}

impl Connections {
    /// Runs a script. Takes at most twice the call timeout: once for a connection, once for a reply.
    pub(super) async fn run(&self, call: &Call, urgency: Urgency) -> Result<Value, Failure> {
        match self {
            Self::Shared(shared) => shared.run(call).await,
            Self::Pool(pool) => pool.run(call, urgency).await,
        }
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the client: it holds the password.
        f.write_str(match self {
            Self::Shared(_) => "shared connection",
            Self::Pool(_) => "pool",
        })
    }
}

/// Makes connections, with an explicit limit on everything.
pub(super) struct Dialer {
    client: Client,
    config: AsyncConnectionConfig,
}

impl Dialer {
    /// A dialer for this address.
    pub(super) fn new(url: &str, connect_timeout: Duration) -> RedisResult<Self> {
        let info = url.into_connection_info()?;
        let settings = tcp_settings(info.tcp_settings().clone());
        let client = Client::open(info.set_tcp_settings(settings))?;
        // The time of a reply is limited once per call, by us; a second timer would cost and say
        // the same.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(connect_timeout))
            .set_response_timeout(None);
        Ok(Self { client, config })
    }

    async fn dial(&self) -> RedisResult<::redis::aio::MultiplexedConnection> {
        self.client.get_multiplexed_async_connection_with_config(&self.config).await
    }
}

fn tcp_settings(settings: ::redis::io::tcp::TcpSettings) -> ::redis::io::tcp::TcpSettings {
    // Without NODELAY a small command waits for the acknowledgement of the one before, which on a
    // real network is a round trip. (On loopback it costs a little, since fewer commands share a
    // packet.)
    let keepalive = ::redis::io::tcp::socket2::TcpKeepalive::new().with_time(KEEPALIVE_IDLE);
    let settings = settings.set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(TCP_USER_TIMEOUT);
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: &str) -> Failure {
        Failure::of_reply(::redis::make_extension_error(code.to_owned(), None))
    }

    #[test]
    fn what_the_server_refuses_was_not_done() {
        let kinds = [
            ("OOM", StoreErrorKind::Full),
            ("READONLY", StoreErrorKind::Unavailable),
            ("BUSY", StoreErrorKind::Unavailable),
            ("LOADING", StoreErrorKind::Unavailable),
            ("MASTERDOWN", StoreErrorKind::Unavailable),
            ("MISCONF", StoreErrorKind::Unavailable),
            ("NOPERM", StoreErrorKind::Backend),
            ("ERR", StoreErrorKind::Backend),
        ];
        for (code, kind) in kinds {
            assert_eq!(answer(code).kind(), kind, "{code}");
        }
    }

    #[test]
    fn a_connection_that_breaks_leaves_the_outcome_unknown() {
        use std::io::{Error, ErrorKind};
        for kind in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset, ErrorKind::TimedOut] {
            let failure = Failure::of_reply(Error::from(kind).into());
            assert_eq!(failure.kind(), StoreErrorKind::OutcomeUnknown, "{kind:?}");
        }
    }
}
