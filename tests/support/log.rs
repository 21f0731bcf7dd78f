//! What is logged on the thread of a test.

use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Level};
use tracing_subscriber::fmt::MakeWriter;

/// A subscriber that nobody uses. As long as a program has one subscriber, `tracing` asks only the one of
/// the thread that comes to a call site first: where that is the thread of another test, which has none,
/// the site is off for good, and what this one waits for is never logged.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| subscriber(Level::TRACE, std::io::sink));

fn subscriber<W>(level: Level, writer: W) -> Dispatch
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt().with_ansi(false).with_max_level(level).with_writer(writer).into()
}

/// What is logged on this thread.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Collects what is logged at this level and above, until the guard is dropped.
    pub fn install(level: Level) -> (Self, DefaultGuard) {
        LazyLock::force(&SECOND);
        let log = Self::default();
        let guard = tracing::dispatcher::set_default(&subscriber(level, log.clone()));
        (log, guard)
    }

    /// What was written since the last time.
    pub fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_site_that_another_thread_comes_to_first_is_heard_here() {
        let say = || tracing::info!("something");
        let (log, _guard) = Log::install(Level::INFO);
        std::thread::spawn(say).join().unwrap();
        assert_eq!(log.take(), "");
        say();
        assert!(log.take().contains("something"));
    }
}
