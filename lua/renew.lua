#!lua flags=allow-oom
--[[ Extends the lease of its holder, and writes a checkpoint if one is given.
     One script, because the holder must not change between the look and the write.
     It may exceed maxmemory: a handler that runs must not lose its lease to a full Redis.

  KEYS[1]  record       (string; the layout stands in src/record/codec.rs)
  ARGV[1]  fingerprint  (36 bytes: recipe id and digest)
  ARGV[2]  owner        (32 bytes: holder 16, attempt 4, fence 6, created 6, as in the record)
  ARGV[3]  lease        (milliseconds)
  ARGV[4]  kept for     (milliseconds: the lease, and the retention of an unknown outcome)
  ARGV[5]  checkpoint   (bytes; left out to keep the one that is there)
  Returns  1 renewed
         | 2 restored
         | 3 lost
         | 4 unreadable
]]
local time = redis.call('TIME')
local key, print, owner = KEYS[1], ARGV[1], ARGV[2]
local lease, kept_for, checkpoint = tonumber(ARGV[3]), ARGV[4], ARGV[5]

local sub, pack = string.sub, struct.pack
local MAX_48, MAX_32 = 281474976710655, 4294967295
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local term = pack('>I6I4', math.min(now + lease, MAX_48), math.min(lease, MAX_32))
local note = checkpoint and pack('>I4', #checkpoint) .. checkpoint

local record = redis.call('GET', key)
if not record then
  redis.call('SET', key, '\1\1' .. print .. owner .. term .. (note or '\0\0\0\0'), 'PX', kept_for)
  return {2}
end

local version, state = string.byte(record, 1, 2)
if version ~= 1 or #record < 84 then return {4} end
-- The first claim of a key leaves its times to the key's expiry. Here they are written out.
if state == 6 or state == 7 then
  local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
  if till > 0 then
    local made = math.max(till - struct.unpack('>I4', record, 77), 0)
    local fence = struct.unpack('>I6', record, 59)
    if fence + 1000 < made then fence = made end
    state = state == 6 and 1 or 5
    record = '\1' .. string.char(state) .. sub(record, 3, 58)
      .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
  end
end
local length, noted = struct.unpack('>I4I4', record, 77)
local answer = #record - 84 - noted
if state < 1 or state > 5 or answer ~= (state == 4 and math.max(length, 1) or 0) then return {4} end

if (state ~= 1 and state ~= 5) or sub(record, 39, 54) ~= sub(owner, 1, 16) then return {3} end
-- What follows a checkpoint may be the effect.
if note then state = 1 end
redis.call('SET', key, '\1' .. string.char(state) .. sub(record, 3, 70) .. term .. (note or sub(record, 81)),
  'PX', kept_for)
return {1}
