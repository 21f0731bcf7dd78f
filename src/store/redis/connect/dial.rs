//! Making a connection, with an explicit limit on everything.

use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisResult};

use super::link::Line;
use super::sentinel::Sentinels;
use super::stream::{self, KEEPALIVE_IDLE};

/// How many calls may be on their way to the connection's task before the next one waits: the requests that
/// a busy process has in the air.
const CALLS_QUEUED: usize = 1_024;

/// Makes connections.
pub(in crate::store::redis) struct Dialer {
    to: To,
    config: AsyncConnectionConfig,
    connect_timeout: Duration,
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
        Ok(Self { to, config: config(connect_timeout), connect_timeout })
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
        Ok(Self { to, config: config(connect_timeout), connect_timeout })
    }

    /// True if a new connection may lead to another server.
    pub(super) fn follows(&self) -> bool {
        matches!(self.to, To::Primary(_))
    }

    pub(super) async fn dial(&self) -> RedisResult<Line> {
        match &self.to {
            To::One(client) => stream::open(client, &self.config, self.connect_timeout).await,
            To::Primary(sentinels) => sentinels.dial(&self.config, self.connect_timeout).await,
        }
    }
}

fn config(connect_timeout: Duration) -> AsyncConnectionConfig {
    // The time of a reply is limited once per call, by us; a second timer would cost and say the
    // same.
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        .set_response_timeout(None)
        .set_pipeline_buffer_size(CALLS_QUEUED)
}

fn tuned(info: ConnectionInfo) -> ConnectionInfo {
    let settings = tcp_settings(info.tcp_settings().clone());
    info.set_tcp_settings(settings)
}

fn tcp_settings(settings: TcpSettings) -> TcpSettings {
    // For what the library connects by itself; see `stream` for the reasons.
    let keepalive = ::redis::io::tcp::socket2::TcpKeepalive::new().with_time(KEEPALIVE_IDLE);
    let settings = settings.set_nodelay(true).set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(stream::TCP_USER_TIMEOUT);
    settings
}
