//! Making a connection, with an explicit limit on everything.

use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::io::tcp::TcpSettings;
use ::redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisResult};

use super::sentinel::Sentinels;

/// How long sent bytes may stay unacknowledged before the kernel gives the connection up. Far beyond
/// what a call waits, since the watchdog is faster; it ends connections to hosts that vanished.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection is idle before the kernel asks if the other side is there. Below the
/// minutes after which common firewalls forget an idle connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Makes connections.
pub(in crate::store::redis) struct Dialer {
    to: To,
    config: AsyncConnectionConfig,
}

enum To {
    One(Client),
    Primary(Sentinels),
}

impl Dialer {
    /// A dialer for this server.
    pub(in crate::store::redis) fn new(
        info: ConnectionInfo,
        connect_timeout: Duration,
    ) -> RedisResult<Self> {
        let to = To::One(Client::open(tuned(info))?);
        Ok(Self { to, config: config(connect_timeout) })
    }

    /// A dialer for whatever is the primary at that moment.
    pub(in crate::store::redis) fn through_sentinels(
        sentinels: Vec<ConnectionInfo>,
        name: Box<str>,
        primary: ConnectionInfo,
        connect_timeout: Duration,
    ) -> RedisResult<Self> {
        let sentinels = sentinels.into_iter().map(tuned).collect();
        // Two steps, one after the other, beside that of connecting itself.
        let step = connect_timeout / 2;
        let to = To::Primary(Sentinels::new(sentinels, name, tuned(primary), step)?);
        Ok(Self { to, config: config(connect_timeout) })
    }

    /// True if a new connection may lead to another server.
    pub(super) fn follows(&self) -> bool {
        matches!(self.to, To::Primary(_))
    }

    pub(super) async fn dial(&self) -> RedisResult<MultiplexedConnection> {
        match &self.to {
            To::One(client) => {
                client.get_multiplexed_async_connection_with_config(&self.config).await
            }
            To::Primary(sentinels) => sentinels.dial(&self.config).await,
        }
    }
}

fn config(connect_timeout: Duration) -> AsyncConnectionConfig {
    // The time of a reply is limited once per call, by us; a second timer would cost and say the
    // same.
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        .set_response_timeout(None)
}

fn tuned(info: ConnectionInfo) -> ConnectionInfo {
    let settings = tcp_settings(info.tcp_settings().clone());
    info.set_tcp_settings(settings)
}

fn tcp_settings(settings: TcpSettings) -> TcpSettings {
    // Without NODELAY a small command waits for the acknowledgement of the one before, which on a
    // real network is a round trip. (On loopback it costs a little, since fewer commands share a
    // packet.)
    let keepalive = ::redis::io::tcp::socket2::TcpKeepalive::new().with_time(KEEPALIVE_IDLE);
    let settings = settings.set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(TCP_USER_TIMEOUT);
    settings
}
