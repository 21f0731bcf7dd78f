//! One attempt at one payment, with the boundaries of its transactions in one of six places.

use std::convert::Infallible;
use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use sqlx::SqlitePool;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{
    Config, Execution, IdempotencyLayer, Recovery, RedisStore, Scope, SqliteStore, Store, Tx,
};

type Failure = Box<dyn Error + Send + Sync>;

/// Where the boundary of the transaction lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scheme {
    /// Effect, key and answer commit together.
    Together,
    /// The key commits first, then the effect.
    KeyFirst,
    /// The effect commits first, then the key.
    EffectFirst,
    AtMostOnce,
    AtLeastOnce,
    /// And what is called deduplicates on the downstream key.
    AtLeastOnceDownstream,
}

/// When the first attempt's server dies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cut {
    AfterClaim,
    AfterEffect,
    AfterCommit,
    /// It does not die; the answer does not arrive.
    AnswerLost,
}

/// Short, so that the lab need not wait.
const LEASE: Duration = Duration::from_millis(300);

impl Scheme {
    pub(crate) const ALL: [Self; 6] = [
        Self::Together,
        Self::KeyFirst,
        Self::EffectFirst,
        Self::AtMostOnce,
        Self::AtLeastOnce,
        Self::AtLeastOnceDownstream,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::KeyFirst => "key-first",
            Self::EffectFirst => "effect-first",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
            Self::AtLeastOnceDownstream => "at-least-once-downstream",
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Together => "effect and key in one transaction",
            Self::KeyFirst => "key first, in its own transaction",
            Self::EffectFirst => "effect first, in its own transaction",
            Self::AtMostOnce => "Redis, at most once",
            Self::AtLeastOnce => "Redis, at least once",
            Self::AtLeastOnceDownstream => "Redis, at least once, with a downstream key",
        }
    }

    pub(crate) fn needs_redis(self) -> bool {
        matches!(self, Self::AtMostOnce | Self::AtLeastOnce | Self::AtLeastOnceDownstream)
    }
}

impl Cut {
    pub(crate) const ALL: [Self; 4] =
        [Self::AfterClaim, Self::AfterEffect, Self::AfterCommit, Self::AnswerLost];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AfterClaim => "claim",
            Self::AfterEffect => "effect",
            Self::AfterCommit => "commit",
            Self::AnswerLost => "answer",
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::AfterClaim => "after the claim",
            Self::AfterEffect => "after the effect",
            Self::AfterCommit => "after the commit",
            Self::AnswerLost => "answer lost",
        }
    }
}

/// Dies here, if this is where the attempt is to be cut.
fn reach(cut: Option<Cut>, here: Cut) {
    if cut == Some(here) {
        std::process::abort();
    }
}

const EFFECTS: &str = "CREATE TABLE IF NOT EXISTS effects (provider_key TEXT);
                       CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY)";
const PAY: &str = "INSERT INTO effects VALUES (NULL)";
const PAY_ONCE: &str = "INSERT INTO effects SELECT $1
                         WHERE NOT EXISTS (SELECT 1 FROM effects WHERE provider_key = $1)";
const KEY: &str = "order-1";

/// Makes one attempt and says what came of it: status and code.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn attempt(
    scheme: &str,
    cut: &str,
    folder: &str,
    redis: &str,
) -> Result<(), Failure> {
    let scheme = Scheme::ALL.into_iter().find(|each| each.name() == scheme);
    let scheme = scheme.ok_or("no such boundary")?;
    let cut = Cut::ALL.into_iter().find(|each| each.name() == cut);
    let (status, code) = run(scheme, cut, Path::new(folder), redis).await?;
    reach(cut, Cut::AfterCommit);
    println!("{} {code}", status.as_u16());
    Ok(())
}

async fn run(
    scheme: Scheme,
    cut: Option<Cut>,
    folder: &Path,
    redis: &str,
) -> Result<(StatusCode, String), Failure> {
    let store = SqliteStore::open(folder.join("lab.db")).await?;
    store.migrate().await?;
    let pool = store.pool().clone();
    sqlx::raw_sql(EFFECTS).execute(&pool).await?;
    match scheme {
        Scheme::Together => {
            let folder = folder.to_owned();
            let handler = move |request: Request<Full<Bytes>>| {
                let folder = folder.clone();
                async move {
                    note_attempt(&folder)?;
                    reach(cut, Cut::AfterClaim);
                    let mut tx = Tx::<sqlx::Sqlite>::take(request.extensions())?;
                    sqlx::query(PAY).execute(&mut tx).await?;
                    reach(cut, Cut::AfterEffect);
                    Ok(())
                }
            };
            through_the_layer(store, Recovery::AtMostOnce, handler).await
        }
        Scheme::KeyFirst => {
            let new = sqlx::query("INSERT OR IGNORE INTO keys VALUES ($1)").bind(KEY);
            // The key is there already: somebody has done it, has he not?
            if new.execute(&pool).await?.rows_affected() == 1 {
                note_attempt(folder)?;
                reach(cut, Cut::AfterClaim);
                sqlx::query(PAY).execute(&pool).await?;
                reach(cut, Cut::AfterEffect);
            }
            Ok((StatusCode::CREATED, "paid".to_owned()))
        }
        Scheme::EffectFirst => {
            let known = "SELECT COUNT(*) FROM keys WHERE key = $1";
            let known: i64 = sqlx::query_scalar(known).bind(KEY).fetch_one(&pool).await?;
            if known == 0 {
                note_attempt(folder)?;
                reach(cut, Cut::AfterClaim);
                sqlx::query(PAY).execute(&pool).await?;
                reach(cut, Cut::AfterEffect);
                sqlx::query("INSERT INTO keys VALUES ($1)").bind(KEY).execute(&pool).await?;
            }
            Ok((StatusCode::CREATED, "paid".to_owned()))
        }
        Scheme::AtMostOnce | Scheme::AtLeastOnce | Scheme::AtLeastOnceDownstream => {
            let folder = folder.to_owned();
            // Each line of the table is another payment; Redis is the same.
            let store = RedisStore::builder().prefix(prefix(&folder)).connect(redis).await?;
            let recovery = if scheme == Scheme::AtMostOnce {
                Recovery::AtMostOnce
            } else {
                Recovery::AtLeastOnce
            };
            let handler = move |request: Request<Full<Bytes>>| {
                let (folder, pool) = (folder.clone(), pool.clone());
                async move {
                    note_attempt(&folder)?;
                    reach(cut, Cut::AfterClaim);
                    pay_outside(&pool, scheme, &request).await?;
                    reach(cut, Cut::AfterEffect);
                    Ok(())
                }
            };
            through_the_layer(store, recovery, handler).await
        }
    }
}

/// The provider, which the layer knows nothing of.
async fn pay_outside<B>(
    pool: &SqlitePool,
    scheme: Scheme,
    request: &Request<B>,
) -> Result<(), Failure> {
    let execution = request.extensions().get::<Execution>().ok_or("no layer")?;
    let pay = if scheme == Scheme::AtLeastOnceDownstream {
        sqlx::query(PAY_ONCE).bind(execution.downstream_key("charge"))
    } else {
        sqlx::query(PAY)
    };
    pay.execute(pool).await?;
    Ok(())
}

/// Sends one request through the layer, and says what it answers.
async fn through_the_layer<F>(
    store: impl Store,
    recovery: Recovery,
    handler: impl Fn(Request<Full<Bytes>>) -> F + Clone + Send + Sync + 'static,
) -> Result<(StatusCode, String), Failure>
where
    F: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let config = Config::builder().scope(Scope::global()).recovery(recovery);
    let config = config.lease(LEASE).wait(Duration::ZERO).build()?;
    let service = service_fn(move |request| {
        let handled = handler(request);
        async move {
            let (status, body) = match handled.await {
                Ok(()) => (StatusCode::CREATED, "paid".to_owned()),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            };
            let mut response = Response::new(Full::<Bytes>::from(body));
            *response.status_mut() = status;
            Ok::<_, Infallible>(response)
        }
    });
    let layer = IdempotencyLayer::new(config, store);
    let request = Request::post("/pay").header("idempotency-key", KEY).body(Full::default())?;
    let (head, body) = layer.layer(service).oneshot(request).await?.into_parts();
    let body = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
    Ok((head.status, code(&head.headers, &body)))
}

/// The code of a refusal, or the body in one word.
fn code(headers: &HeaderMap, body: &[u8]) -> String {
    let is_problem = headers.get("content-type").is_some_and(|t| t == "application/problem+json");
    let problem = serde_json::from_slice::<serde_json::Value>(body).ok().filter(|_| is_problem);
    match problem.as_ref().and_then(|problem| problem["code"].as_str()) {
        Some(code) => code.to_owned(),
        None => String::from_utf8_lossy(body).replace(char::is_whitespace, "_"),
    }
}

fn prefix(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    format!("lab-{}", name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"))
}

/// Attempts are counted in a file of their own, which no transaction undoes.
fn note_attempt(folder: &Path) -> std::io::Result<()> {
    let file = folder.join("attempts");
    std::fs::OpenOptions::new().create(true).append(true).open(file)?.write_all(b"x")
}

/// How often a handler was started, and how many effects there are.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn count(folder: &Path) -> Result<(u64, i64), Box<dyn Error>> {
    let attempts = std::fs::metadata(folder.join("attempts")).map_or(0, |file| file.len());
    let store = SqliteStore::open(folder.join("lab.db")).await?;
    let effects = "SELECT COUNT(*) FROM effects";
    Ok((attempts, sqlx::query_scalar(effects).fetch_one(store.pool()).await?))
}
