//! Accepting connections, and stopping without losing a payment.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout_at};
use tower_idempotency::IdempotencyLayer;

use crate::app::App;

/// What is left for writing answers, when running payments have used up all of the grace.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// A connection that has not sent a whole request head by then is closed.
const HEAD_WITHIN: Duration = Duration::from_secs(60);

/// Serves HTTP/1.1 and HTTP/2 (prior knowledge) until `stop`, then drains within `grace`.
///
/// First no new connection is accepted and no new payment started, while the running ones end and
/// are recorded; only then are the connections told to close, so that every answer is written.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    app: &App,
    idempotency: &IdempotencyLayer,
    stop: impl Future<Output = ()>,
    grace: Duration,
) {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
    http.http2().timer(TokioTimer::new());
    let connections = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        let stream = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, most likely: others close some meanwhile.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        // Answers are small and written in one piece: waiting for more only delays them.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service).into_owned();
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error, "a connection ended early");
            }
        });
    }

    drop(listener);
    app.draining.store(true, Ordering::Relaxed);
    let end = Instant::now() + grace;
    idempotency.drain(grace).await;
    let end = end.max(Instant::now() + LAST_WORDS);
    if timeout_at(end, connections.shutdown()).await.is_err() {
        tracing::warn!("connections were still open at the end of the grace");
    }
    let _ = timeout_at(end + LAST_WORDS, app.ledger.close()).await;
}

/// Waits for SIGINT or SIGTERM.
#[cfg(unix)]
pub(crate) fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
pub(crate) fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}
