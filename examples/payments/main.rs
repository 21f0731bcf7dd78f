//! A payment API in miniature, with an idempotency layer around it: `cargo run --example payments`.
//!
//! It charges test cards that fail in every interesting way, and keeps a ledger of what really
//! happened, so that one can count: however often a payment is retried, it happened once.
//! Start with `payments.rs` (the handlers) and `app.rs` (the layers around them).

use std::error::Error;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tower_idempotency::{IdempotencyLayer, Recovery};
use tracing_subscriber::EnvFilter;

mod account;
mod answer;
mod app;
mod books;
mod flags;
mod form;
mod ledger;
mod payments;
mod reconcile;
mod runs;
mod serve;
mod source;
mod store;
mod stream;
mod stripe;

use app::App;
use flags::{Flags, RecoveryMode};
use ledger::Deduplicate;

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::read();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Whoever reads the log may go away, and a payment must not fail for that.
        .log_internal_errors(false)
        .init();
    match run(&flags).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: &Flags) -> Result<(), Box<dyn Error>> {
    let metrics = record_metrics()?;
    let stop = serve::stop_signal()?;
    let deduplicate = match flags.recovery {
        RecoveryMode::AtMostOnce => Deduplicate::No,
        RecoveryMode::AtLeastOnce | RecoveryMode::Reconcile => Deduplicate::Yes,
    };
    let (store, ledger) = flags.store().open(&flags.ledger(), deduplicate).await?;
    let recovery = match flags.recovery {
        RecoveryMode::AtMostOnce => Recovery::AtMostOnce,
        RecoveryMode::AtLeastOnce => Recovery::AtLeastOnce,
        RecoveryMode::Reconcile => reconcile::by_asking(ledger.clone()),
    };
    let rules = flags.rules(&recovery)?;
    if let Some(note) = &rules.note {
        eprintln!("{note}");
    }
    let listener = TcpListener::bind(flags.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", flags.listen))?;

    let idempotency = IdempotencyLayer::new(rules.required.clone(), Arc::clone(&store));
    let engine = idempotency.engine().clone();
    let app = App { ledger, store, metrics, engine, draining: Arc::default() };
    let router = app::router(app.clone(), rules, &idempotency);
    greet(listener.local_addr()?, flags);
    serve::serve(listener, router, &app, &idempotency, stop, flags.drain).await;
    Ok(())
}

/// Installs the recorder that the layer's counters go to.
fn record_metrics() -> Result<PrometheusHandle, Box<dyn Error>> {
    let seconds = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
    let handle = PrometheusBuilder::new().set_buckets(&seconds)?.install_recorder()?;
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// Tells where everything is, and what to try first.
fn greet(address: SocketAddr, flags: &Flags) {
    let key = format!("order-{:08x}", rand::random::<u32>());
    let pay = |amount: u32| {
        format!(
            "curl -i http://{address}/v1/payments -u sk_test_acme: -H 'Idempotency-Key: {key}' \
             -H 'Content-Type: application/json' \
             -d '{{\"amount\": {amount}, \"currency\": \"usd\", \"source\": \"tok_visa\"}}'"
        )
    };
    let (first, changed) = (pay(1999), pay(2999));
    let store = flags.store();
    let ledger = store.ledger(&flags.ledger());
    // Whoever reads this may have gone away; that is no reason to stop.
    let _ = write!(
        std::io::stdout().lock(),
        "listening on http://{address}\n\
         store:  {store}\n\
         ledger: {ledger} (see http://{address}/v1/ledger)\n\
         \n\
         # Make a payment:\n{first}\n\
         # The same again is replayed, not charged:\n{first}\n\
         # Another amount under the same key is refused:\n{changed}\n"
    );
}
