// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VLANs: on which one a frame comes in, whether it may leave by a port, and with a tag or without (IEEE 802.1Q).

use crate::policy::{Policy, Vlan};

const TAG: [u8; 2] = [0x81, 0x00];

/// The VLAN that a frame is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its number, if the switch has looked at it.
    pub vid: Option<u16>,
    /// The frame carries a tag as it is.
    pub tagged: bool,
    /// It came by a port that takes no notice of VLANs.
    pub open: bool,
}

/// What to do to a frame's tag when it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    /// Nothing.
    Keep,
    /// Put this one in.
    Push(u16),
    /// Take it out.
    Pop,
}

/// The VLAN of a frame that a port sends, by its first bytes. None: not one of the port's.
#[must_use]
pub fn enter(policy: &Policy, head: &[u8]) -> Option<Lane> {
    let vid = match head.get(12..16) {
        Some(&[a, b, high, low]) if [a, b] == TAG => Some(u16::from_be_bytes([high, low]) & 0xfff),
        _ => None,
    };
    let tagged = vid.is_some();
    // A tag of VLAN 0 only carries a priority.
    let real = vid.filter(|v| *v != 0);
    match &policy.vlan {
        Vlan::Transparent => Some(Lane { vid: real.filter(|_| policy.uplink), tagged, open: true }),
        Vlan::Access(own) => real.is_none().then_some(Lane { vid: Some(*own), tagged, open: false }),
        Vlan::Trunk { vlans, native } => match real {
            Some(v) => vlans.contains(&v).then_some(Lane { vid: Some(v), tagged, open: false }),
            None => native.map(|n| Lane { vid: Some(n), tagged, open: false }),
        },
    }
}

/// May a frame on `lane` leave by this port, and how? None: no.
#[must_use]
pub fn leave(policy: &Policy, lane: Lane) -> Option<Edit> {
    let bare = if lane.tagged { Edit::Pop } else { Edit::Keep };
    let with_tag = |vid| if lane.tagged { Edit::Keep } else { Edit::Push(vid) };
    match (&policy.vlan, lane.vid) {
        (Vlan::Transparent, Some(vid)) if policy.uplink => Some(with_tag(vid)),
        (Vlan::Transparent, None) => Some(Edit::Keep),
        (Vlan::Transparent, Some(_)) => lane.open.then_some(Edit::Keep),
        (Vlan::Access(own), vid) => (vid == Some(*own)).then_some(bare),
        (Vlan::Trunk { vlans, native }, Some(vid)) => {
            if *native == Some(vid) {
                Some(bare)
            } else {
                vlans.contains(&vid).then(|| with_tag(vid))
            }
        }
        (Vlan::Trunk { .. }, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(vid: Option<u16>) -> Vec<u8> {
        let mut h = vec![0; 12];
        match vid {
            Some(v) => h.extend([0x81, 0, (v >> 8) as u8, v as u8]),
            None => h.extend([8, 0, 0x45, 0]),
        }
        h
    }

    fn port(vlan: Vlan) -> Policy {
        Policy { vlan, ..Policy::default() }
    }

    fn way(from: &Policy, vid: Option<u16>, to: &Policy) -> Option<Edit> {
        leave(to, enter(from, &head(vid))?)
    }

    #[test]
    fn frames_stay_on_their_vlan_and_tags_are_put_in_and_taken_out() {
        let (a5, a6) = (port(Vlan::Access(5)), port(Vlan::Access(6)));
        let trunk = port(Vlan::Trunk { vlans: vec![5, 7], native: Some(6) });
        let open = port(Vlan::Transparent);
        let uplink = Policy { uplink: true, ..Policy::default() };
        assert_eq!(way(&a5, None, &a5), Some(Edit::Keep));
        assert_eq!(way(&a5, None, &a6), None);
        assert_eq!(way(&a5, Some(6), &a6), None, "no hopping by a tag of one's own");
        assert_eq!(way(&a5, Some(5), &a5), None);
        assert_eq!(way(&a5, Some(0), &a5), Some(Edit::Pop), "a priority tag");
        assert_eq!(way(&a5, None, &trunk), Some(Edit::Push(5)));
        assert_eq!(way(&a6, None, &trunk), Some(Edit::Keep), "native");
        assert_eq!(way(&trunk, Some(5), &a5), Some(Edit::Pop));
        assert_eq!(way(&trunk, None, &a6), Some(Edit::Keep));
        assert_eq!(way(&trunk, Some(8), &a5), None);
        assert_eq!(way(&trunk, Some(7), &trunk), Some(Edit::Keep));
        assert_eq!(way(&open, None, &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(9), &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(5), &a5), None, "a transparent port can't enter a VLAN");
        assert_eq!(way(&a5, None, &open), None);
        assert_eq!(way(&a5, None, &uplink), Some(Edit::Push(5)));
        assert_eq!(way(&uplink, Some(5), &a5), Some(Edit::Pop));
        assert_eq!(way(&uplink, None, &a5), None);
        assert_eq!(way(&uplink, None, &open), Some(Edit::Keep));
        assert_eq!(way(&uplink, Some(5), &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(5), &uplink), Some(Edit::Keep));
    }
}
