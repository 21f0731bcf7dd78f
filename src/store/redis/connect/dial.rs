//! Making a connection, with an explicit limit on everything.

use std::time::Duration;

use ::redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, RedisResult};

/// How long sent bytes may stay unacknowledged before the kernel gives the connection up. Far beyond
/// what a call waits, since the watchdog is faster; it ends connections to hosts that vanished.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection is idle before the kernel asks if the other side is there. Below the
/// minutes after which common firewalls forget an idle connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Makes connections.
pub(in crate::store::redis) struct Dialer {
    client: Client,
    config: AsyncConnectionConfig,
}

impl Dialer {
    /// A dialer for this address.
    pub(in crate::store::redis) fn new(url: &str, connect_timeout: Duration) -> RedisResult<Self> {
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

    /// True if a new connection may lead to another server.
    pub(super) fn follows(&self) -> bool {
        false
    }

    pub(super) async fn dial(&self) -> RedisResult<::redis::aio::MultiplexedConnection> {
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
