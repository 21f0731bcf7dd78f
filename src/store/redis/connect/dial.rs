//! Making a connection, with an explicit limit on everything.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{AsyncConnectionConfig, Client, Cmd, ConnectionInfo, RedisResult};
use tokio::time::timeout;

use super::kin::Kin;
use super::link::Line;
use super::reasons::{of_no_line, of_no_password};
use super::sentinel::Sentinels;
use super::stream::{self, KEEPALIVE_IDLE};
use super::votes::{Named, Place};
use super::{DialError, Failure, Message, follow, is_about_login, is_answer};

/// How many calls may be on their way to the connection's task before the next one waits: the requests that
/// a busy process has in the air.
const CALLS_QUEUED: usize = 1_024;

/// Makes connections.
pub(in crate::store::redis) struct Dialer {
    to: To,
    config: AsyncConnectionConfig,
    connect_timeout: Duration,
    /// Grows whenever the primary is another server than before: what was connected earlier is left then.
    era: AtomicU64,
    known: Mutex<Option<Named>>,
    following: AtomicBool,
}

enum To {
    One(Client),
    Member(Client, Arc<Kin>),
    Primary(Sentinels),
}

impl Dialer {
    /// A dialer for this server.
    pub(in crate::store::redis) fn new(
        info: ConnectionInfo,
        connect_timeout: Duration,
    ) -> RedisResult<Self> {
        Ok(Self::to(To::One(Client::open(tuned(info))?), connect_timeout))
    }

    /// A dialer for a node of a cluster.
    pub(super) fn of_a_cluster(
        info: ConnectionInfo,
        kin: &Arc<Kin>,
        connect_timeout: Duration,
    ) -> RedisResult<Self> {
        let to = To::Member(Client::open(tuned(info))?, Arc::clone(kin));
        Ok(Self::to(to, connect_timeout))
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
        Ok(Self::to(to, connect_timeout))
    }

    fn to(to: To, connect_timeout: Duration) -> Self {
        Self {
            to,
            config: config(connect_timeout),
            connect_timeout,
            era: AtomicU64::new(0),
            known: Mutex::default(),
            following: AtomicBool::new(false),
        }
    }

    /// True if a new connection may lead to another server.
    pub(super) fn follows(&self) -> bool {
        matches!(self.to, To::Primary(_))
    }

    /// A connection, and the era that it belongs to.
    pub(super) async fn dial(self: &Arc<Self>) -> Result<(Line, u64), DialError> {
        match &self.to {
            To::One(client) => {
                let line = open(client, &self.config, self.connect_timeout).await?;
                Ok((line, self.era()))
            }
            To::Member(client, kin) => {
                let mut line = open(client, &self.config, self.connect_timeout).await?;
                kin.recognise(&mut line, client, self.connect_timeout).await?;
                Ok((line, self.era()))
            }
            To::Primary(sentinels) => {
                let known = self.known().clone();
                let (line, named) =
                    sentinels.dial(known.clone(), &self.config, self.connect_timeout).await?;
                let era = self.found(named, known.as_ref());
                follow::begin(self, || sentinels.watchers(&self.config));
                Ok((line, era))
            }
        }
    }

    /// Connections of another era lead to a server that is the primary no more.
    pub(super) fn era(&self) -> u64 {
        self.era.load(Ordering::Relaxed)
    }

    fn known(&self) -> MutexGuard<'_, Option<Named>> {
        // Nothing that can panic runs while it is locked.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The era of a connection to this server, by who knew so much when he began to make it.
    fn found(&self, named: Named, before: Option<&Named>) -> u64 {
        let mut known = self.known();
        let place = |named: &Named| named.place.clone();
        let now = known.as_ref().map(place);
        if now != before.map(place) && now.is_some_and(|now| now != named.place) {
            // Somebody has heard otherwise meanwhile: it is not used.
            return self.era().wrapping_sub(1);
        }
        self.learn(&mut known, named)
    }

    fn learn(&self, known: &mut Option<Named>, named: Named) -> u64 {
        let named = known.iter().fold(named, Named::after);
        let place = named.place.clone();
        let before = known.replace(named).map(|before| before.place);
        let Some(before) = before.filter(|before| *before != place) else { return self.era() };
        let shown = |(host, port): &Place| format!("{host}:{port}");
        tracing::warn!(
            from = shown(&before),
            to = shown(&place),
            "the primary is another Redis server than before: what the last one was told at the end is lost, as far \
             as `wait` did not cover it"
        );
        self.era.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Lets somebody who has heard the Sentinels say what to believe instead of what is known.
    pub(super) fn hears(&self, judge: impl FnOnce(&Named) -> Option<Named>) {
        let mut known = self.known();
        if let Some(believed) = known.as_ref().and_then(judge) {
            self.learn(&mut known, believed);
        }
    }

    /// True for the first who asks, until it follows no more.
    pub(super) fn begins_to_follow(&self) -> bool {
        !self.following.swap(true, Ordering::Relaxed)
    }

    pub(super) fn follows_no_more(&self) {
        self.following.store(false, Ordering::Relaxed);
    }
}

/// Connects, and says it with the server's own words if it does not let us in.
pub(super) async fn open(
    client: &Client,
    config: &AsyncConnectionConfig,
    within: Duration,
) -> Result<Line, DialError> {
    let error = match stream::open(client, config, within).await {
        Ok(line) => return Ok(line),
        Err(error) if is_about_login(&error) => {
            match of_no_password(client.get_connection_info(), &error) {
                Some(error) => return Err(error),
                None => error,
            }
        }
        Err(error) => return Err(of_no_line(client.get_connection_info(), error)),
    };
    // redis-rs keeps the server's words to itself: whether the password is wrong, or none is asked for. So it
    // is asked once more.
    let refused = timeout(within, refusal_to_login(client, config, within)).await;
    match refused {
        Ok(Ok(())) | Err(_) => Err(error.into()),
        Ok(Err(said)) if !is_answer(&said) => Err(of_no_line(client.get_connection_info(), said)),
        Ok(Err(said)) => {
            let settings = client.get_connection_info().redis_settings();
            let user = settings.username().unwrap_or("default").into();
            Err(DialError::Login { user, reason: said.to_string().into() })
        }
    }
}

/// Connects as nobody and gives user and password then.
async fn refusal_to_login(
    client: &Client,
    config: &AsyncConnectionConfig,
    within: Duration,
) -> RedisResult<()> {
    let info = client.get_connection_info();
    let nobody =
        Client::open(info.clone().set_redis_settings(::redis::RedisConnectionInfo::default()))?;
    let mut line = stream::open(&nobody, config, within).await?;
    let mut login = Cmd::new();
    login.arg("AUTH");
    let settings = info.redis_settings();
    if let Some(user) = settings.username() {
        login.arg(user);
    }
    login.arg(settings.password().unwrap_or_default());
    match Message::Question(&login).send(&mut line).await {
        Ok(_) => Ok(()),
        Err(Failure::Refused(error)) => Err(error),
        Err(Failure::NotSent(cause) | Failure::NoAnswer(cause)) => {
            Err(std::io::Error::other(cause).into())
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
