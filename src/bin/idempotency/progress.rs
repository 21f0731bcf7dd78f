//! How far a pass over all keys is.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use tower_idempotency::admin::brief;
use tower_idempotency::store::AuditStep;

/// How far a pass is, on standard error: one line that moves on a terminal, one now and then elsewhere.
pub struct Progress {
    begun: Instant,
    told: Instant,
    moving: bool,
    shown: bool,
}

impl Progress {
    pub fn new(begun: Instant) -> Self {
        Self { begun, told: begun, moving: io::stderr().is_terminal(), shown: false }
    }

    pub fn tell(&mut self, step: &AuditStep) {
        let pause = Duration::from_millis(if self.moving { 200 } else { 5_000 });
        if step.next.is_none() || self.told.elapsed() < pause {
            return;
        }
        self.told = Instant::now();
        let AuditStep { scanned, found, about, .. } = step;
        // There are other keys too, and keys come and go: it is about so much.
        let part = (scanned * 100).checked_div(*about).unwrap_or(0).min(99);
        let left = match scanned {
            0 => String::new(),
            _ => {
                let elapsed = self.begun.elapsed().as_secs_f64();
                let rest = about.saturating_sub(*scanned) as f64;
                let left = Duration::from_secs_f64(elapsed / *scanned as f64 * rest);
                format!(", {} left", brief(left))
            }
        };
        let line = format!("{part:2} %  {scanned} of about {about} keys, {found} found{left}");
        match self.moving {
            true => eprint!("\r\x1b[K{line}"),
            false => eprintln!("{line}"),
        }
        self.shown = true;
    }

    pub fn end(&self) {
        if self.moving && self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
