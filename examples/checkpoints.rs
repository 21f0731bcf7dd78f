//! A payment in two steps that goes on where a dead process stopped, because each step is noted down.
//!
//! Needs a Redis. Run with `cargo run --example checkpoints -- --stop-at between-steps`, pay as it says, and kill it with
//! `kill -9`; then run it without `--stop-at` and pay again, under the same key. See in `/v1/ledger` that the second
//! process only charged: it has read which reservation the first one made. With `--effects marked --stop-at
//! before-mark` nothing had been marked when the process died, so the key is free and never of unknown outcome.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::future::pending;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use clap::{Parser, ValueEnum};
use http::StatusCode;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::request::Parts;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;
use tower_idempotency::{
    CheckpointError, Config, Effects, Execution, Found, IdempotencyLayer, Interrupted, Outcome,
    Recovery, RedisStore, Scope,
};
use tracing_subscriber::EnvFilter;

/// What is noted down: what the next attempt has to know of this one.
#[derive(Debug, Deserialize, Serialize)]
enum Step {
    /// From here on the provider may have been asked. On a route that marks its effects this is the mark.
    Reserving,
    /// The first step is done, and the second may be.
    Charging { reservation: String },
}

#[derive(Debug, Deserialize, Serialize)]
struct Payment {
    amount: u64,
    currency: String,
    source: String,
}

/// `POST /v1/payments`: reserves, then charges.
async fn pay(
    State(shop): State<Arc<Shop>>,
    execution: Execution,
    payment: Json<Payment>,
) -> Response {
    let run = Run::begins(&execution, &payment);
    let answer = shop.pay(&execution, &payment).await.unwrap_or_else(|error| stopped(&error));
    run.answers();
    answer
}

impl Shop {
    async fn pay(
        &self,
        execution: &Execution,
        payment: &Payment,
    ) -> Result<Response, CheckpointError> {
        let reservation = match execution.last_checkpoint()? {
            // An earlier attempt came this far: what it did is not done again.
            Some(Step::Charging { reservation }) => reservation,
            // This one may have reserved or not. A real provider is asked under `execution.downstream_key("reserve")`,
            // and reserves once.
            Some(Step::Reserving) | None => {
                self.stop_at(Stop::BeforeMark).await;
                execution.checkpoint(&Step::Reserving).await?;
                let reservation = self.provider("reserve", execution, payment);
                let step = Step::Charging { reservation: reservation.clone() };
                execution.checkpoint(&step).await?;
                self.stop_at(Stop::BetweenSteps).await;
                reservation
            }
        };
        let charge = self.provider("charge", execution, payment);
        self.stop_at(Stop::AfterCharge).await;
        let attempt = execution.attempt().number();
        let paid = receipt(&json!(charge), &reservation, &json!(payment), attempt);
        Ok((StatusCode::CREATED, Json(paid)).into_response())
    }

    /// One effect at a provider that deduplicates nothing, so that one can see what is done twice.
    fn provider(&self, action: &str, execution: &Execution, payment: &Payment) -> String {
        let (key_id, attempt) = (key_id(execution), execution.attempt().number());
        let (amount, id) = (payment.amount, format!("{action}-{:08x}", rand::random::<u32>()));
        let entry = json!({
            "action": action, "key_id": key_id, "amount": amount, "source": payment.source,
            "attempt": attempt, "id": id,
        });
        // One write, so processes that share the file never mix their lines.
        let file = OpenOptions::new().create(true).append(true).open(&self.ledger);
        let written = file.and_then(|mut file| file.write_all(format!("{entry}\n").as_bytes()));
        written.expect("the ledger can be written");
        id
    }

    /// Stands still here for ever, if it was asked to.
    async fn stop_at(&self, here: Stop) {
        if self.stop_at == Some(here) {
            pending().await
        }
    }
}

/// The key is held by somebody else, or the store does not confirm the note: nothing more may be done, and what was
/// done stands in the checkpoints.
fn stopped(error: &CheckpointError) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, Outcome::Unknown, error.to_string()).into_response()
}

/// `--recovery reconcile`: looks for what was done. That nothing happened is said only where neither step was: whoever
/// says so starts the next attempt afresh, without the checkpoints of this one. (Fence first where a paused process
/// could still act after the look.)
fn by_looking(ledger: PathBuf) -> Recovery {
    Recovery::reconcile(move |interrupted: Interrupted| {
        let key = key_id_of(interrupted.key().as_str());
        let mut done = entries(&ledger);
        done.retain(|entry| entry["key_id"] == key.as_str());
        let step = interrupted.last_checkpoint();
        async move {
            let charge = done.iter().find(|entry| entry["action"] == "charge");
            match (charge, step) {
                (Some(charge), Ok(Some(Step::Charging { reservation }))) => {
                    let attempt = interrupted.attempt().number();
                    let paid = receipt(&charge["id"], &reservation, charge, attempt);
                    let body = Bytes::from(paid.to_string());
                    let response = http::Response::builder()
                        .status(StatusCode::CREATED)
                        .header(CONTENT_TYPE, "application/json")
                        .body(body);
                    response.map_or(Found::StillUnknown, Found::happened)
                }
                (None, Ok(_)) if done.is_empty() => Found::NothingHappened,
                _ => Found::StillUnknown,
            }
        }
    })
}

fn receipt(charge: &Value, reservation: &str, of: &Value, attempt: u32) -> Value {
    json!({
        "id": charge, "reservation": reservation, "amount": of["amount"], "source": of["source"],
        "attempt": attempt,
    })
}

/// Tells when a handler runs, by `RUST_LOG=checkpoints=debug`. Dropped without a word it was cut off.
struct Run<'a>(&'a Execution, &'static str);

impl<'a> Run<'a> {
    fn begins(execution: &'a Execution, payment: &Payment) -> Self {
        let (key_id, attempt) = (key_id(execution), execution.attempt().number());
        let (fence, Payment { amount, source, .. }) = (execution.fence().number(), payment);
        tracing::debug!(target: "checkpoints::runs", %key_id, attempt, fence, amount, %source, "begins");
        Self(execution, "is cut off")
    }

    fn answers(mut self) {
        self.1 = "answers";
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let Self(execution, end) = self;
        let (key_id, attempt) = (key_id(execution), execution.attempt().number());
        let fence = execution.fence().number();
        tracing::debug!(target: "checkpoints::runs", %key_id, attempt, fence, "{end}");
    }
}

fn key_id(execution: &Execution) -> String {
    key_id_of(execution.key().as_str())
}

/// A key as the ledger shows it.
fn key_id_of(key: &str) -> String {
    Sha256::digest(key).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn entries(ledger: &Path) -> Vec<Value> {
    let text = fs::read_to_string(ledger).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// `GET /v1/ledger`: what really happened.
async fn ledger(State(shop): State<Arc<Shop>>) -> Json<Value> {
    let entries = entries(&shop.ledger);
    let charges = entries.iter().filter(|entry| entry["action"] == "charge").count();
    Json(json!({ "charges": charges, "entries": entries }))
}

struct Shop {
    ledger: PathBuf,
    stop_at: Option<Stop>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Stop {
    BeforeMark,
    BetweenSteps,
    AfterCharge,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RecoveryMode {
    AtMostOnce,
    AtLeastOnce,
    Reconcile,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EffectsMode {
    Anywhere,
    Marked,
}

#[derive(Debug, Parser)]
struct Flags {
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[arg(long, default_value = "redis://127.0.0.1:6379/")]
    store: String,
    #[arg(long, default_value = "checkpoints.jsonl")]
    ledger: PathBuf,
    /// Seconds.
    #[arg(long, default_value_t = 10.0)]
    lease: f64,
    #[arg(long, value_enum, default_value = "at-least-once")]
    recovery: RecoveryMode,
    #[arg(long, value_enum, default_value = "anywhere")]
    effects: EffectsMode,
    /// Where a first attempt stands still, so that one can kill its process there.
    #[arg(long, value_enum)]
    stop_at: Option<Stop>,
}

fn account_of(parts: &Parts) -> Option<String> {
    let credentials = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    credentials.strip_prefix("Bearer sk_test_").map(str::to_owned)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let flags = Flags::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let recovery = match flags.recovery {
        RecoveryMode::AtMostOnce => Recovery::AtMostOnce,
        RecoveryMode::AtLeastOnce => Recovery::AtLeastOnce,
        RecoveryMode::Reconcile => by_looking(flags.ledger.clone()),
    };
    let effects = match flags.effects {
        EffectsMode::Anywhere => Effects::Anywhere,
        EffectsMode::Marked => Effects::Marked,
    };
    let config = Config::builder()
        .scope(Scope::principal(account_of))
        .recovery(recovery)
        .effects(effects)
        .lease(Duration::from_secs_f64(flags.lease));
    let store = RedisStore::connect(&flags.store).await?;
    let shop = Shop { ledger: flags.ledger, stop_at: flags.stop_at };
    let routes = Router::new()
        .route("/v1/payments", post(pay))
        .layer(IdempotencyLayer::new(config.build()?, store))
        .route("/v1/ledger", get(ledger))
        .with_state(Arc::new(shop));
    let listener = TcpListener::bind(flags.listen).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!(
        "curl -i http://{address}/v1/payments -H 'Authorization: Bearer sk_test_acme' -H 'Idempotency-Key: order-17' \
         -H 'Content-Type: application/json' -d '{{\"amount\": 1999, \"currency\": \"usd\", \"source\": \"tok_visa\"}}'"
    );
    axum::serve(listener, routes).await?;
    Ok(())
}
