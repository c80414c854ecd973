//! Remedies, which end faults.

use super::faults::Remedy;
use super::network::{LOSS_PERMILLE_BAD, Link, REPEATS_PERMILLE_BAD};
use super::world::World;

impl World {
    /// Ends a fault by applying `remedy`.
    pub(super) fn apply_remedy(&mut self, remedy: Remedy) {
        let now_us = self.now_us();
        self.trace.event(now_us, format_args!("ends {remedy:?}"));
        match remedy {
            Remedy::Start(id) => self.start(id),
            Remedy::Kill(id) => self.kill(id),
            Remedy::Resume(id) => {
                if let Some(seat) = self.seats.get_mut(&id)
                    && seat.machine.is_paused()
                {
                    super::log::on(id, now_us);
                    seat.machine.resume(now_us);
                    super::log::off();
                    self.network.resume(id);
                }
            }
            Remedy::RightClock(id) => self.seats[&id].machine.wall.set_error_ms(0),
            Remedy::Heal(links) => {
                for (from, to) in links {
                    self.network.heal(from, to);
                    self.links_down.remove(&(from, to));
                }
                self.observe_reach();
            }
            Remedy::Hear(id) => {
                self.network.hear(id);
                self.deaf.remove(&id);
            }
            Remedy::Soothe(links) | Remedy::Quicken(links) => self.restore_links(&links),
            Remedy::QuickDisk(id) => self.seats[&id].pace.recover(),
            Remedy::EndShortage(id) => self.seats[&id].machine.disk.run_short(None),
            Remedy::AnswerScale => {
                if let Some(set) = &self.fleet.set {
                    set.answers(true);
                }
            }
            Remedy::MendDisk(id) => {
                self.kill(id);
                if let Some(seat) = self.seats.get_mut(&id) {
                    seat.machine.disk.fail(None);
                    seat.is_disk_bad = false;
                }
                let wait_us = self.while_us(1000);
                self.remedy_in(wait_us, Remedy::Start(id));
            }
        }
    }

    /// Restores links to a newly drawn quality. In a bad network, they stay bad while faults last.
    fn restore_links(&mut self, links: &[(u8, u8)]) {
        for (from, to) in links {
            let drawn = Link::draw(&mut self.rng);
            let is_bad = self.plan.is_network_bad && self.next_fault_us > 0;
            self.network.change_link(*from, *to, |link| {
                let cut = link.cut;
                *link = Link { cut, ..drawn };
                if is_bad {
                    link.loss_permille = LOSS_PERMILLE_BAD / 4;
                    link.repeats_permille = REPEATS_PERMILLE_BAD / 4;
                }
            });
        }
    }

    /// Restores every link to a good or bad quality, according to the plan.
    pub(super) fn soothe_all(&mut self) {
        let ids: Vec<u8> = self.seats.keys().copied().collect();
        let links = ids
            .iter()
            .flat_map(|from| ids.iter().map(|to| (*from, *to)));
        let links: Vec<(u8, u8)> = links.filter(|(from, to)| from != to).collect();
        self.restore_links(&links);
    }
}
